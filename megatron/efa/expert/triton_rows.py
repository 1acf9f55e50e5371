"""The Triton kernels that move rows. `kernels.py` checks arguments and chooses; call that.

Shapes: N rows that have lists (CSR), M entries of all lists together, H values a row. A program
moves one block of columns of one row: a row of any width fits, and an SM holds many rows in flight.

Strides and widths are passed in units of `UNIT` elements, a power of two that divides them all: the
compiler then sees that vectors of `UNIT` elements are aligned, which it cannot see in a stride that
is a multiple of 8 and not of 16 (a message row that carries more than the token).

The combining functions stand here, not `tl.max` and `tl.sum`: these are compiled ones if triton was
imported before TRITON_INTERPRET was set, and the interpreter could then not call them.
"""

import torch
import triton
import triton.language as tl

from megatron.efa.expert.rows import E4M3_MAX, E4M3_MAX_INVERSE, GROUP, SMALLEST_AMAX

# The fastest of what was tried on an H200. A thread moves 32 bytes of a row (dequantizing it writes
# 64); a spread is best with whole rows, a sum with short pieces, of which more wait at a time.
SPREAD_BYTES = 16384
COLLECT_BYTES = 2048
BYTES_A_WARP = 32 * 32
QUANTIZED_GROUPS, QUANTIZED_WARPS = 16, 4
DEQUANTIZED_GROUPS, DEQUANTIZED_WARPS = 16, 2

# Constants of a kernel must be constexpr.
_GROUP = tl.constexpr(GROUP)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
_E4M3_MAX_INVERSE = tl.constexpr(E4M3_MAX_INVERSE)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_AMAX)
_ALL_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=_ALL_NAN)


@triton.jit(do_not_specialize=["width", "src_stride", "out_stride"])
def _spread(
    src,
    src_stride,
    offsets,
    targets,
    out,
    out_stride,
    width,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + row)
    last = tl.load(offsets + row + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width * UNIT
    if first < last:
        values = tl.load(src + row * src_stride * UNIT + column, mask=inside)
        for entry in range(first, last):
            target = tl.load(targets + entry).to(tl.int64)
            tl.store(out + target * out_stride * UNIT + column, values, mask=inside)


@triton.jit(do_not_specialize=["width", "src_stride", "out_stride"])
def _collect(
    src,
    src_stride,
    offsets,
    sources,
    out,
    out_stride,
    width,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + row)
    last = tl.load(offsets + row + 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width * UNIT
    total = tl.full([BLOCK], 0.0, tl.float32)
    for entry in range(first, last):
        source = tl.load(sources + entry).to(tl.int64)
        values = tl.load(src + source * src_stride * UNIT + column, mask=inside, other=0.0)
        total += values.to(tl.float32)
    at = out + row * out_stride * UNIT + column
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["width", "src_stride", "out_stride", "scale_stride"])
def _spread_quantized(
    src,
    src_stride,
    offsets,
    targets,
    out,
    out_stride,
    scales,
    scale_stride,
    width,
    UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + row)
    last = tl.load(offsets + row + 1)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = column < width * UNIT
    some = group * _GROUP < width * UNIT
    if first < last:
        values = tl.load(src + row * src_stride * UNIT + column, mask=inside, other=0.0)
        values = values.to(tl.float32)
        amax = tl.reduce(tl.abs(values), 1, _larger)
        scale = _larger(amax, _SMALLEST_AMAX) * _E4M3_MAX_INVERSE
        inverse = tl.div_rn(1.0, scale)
        # A value may be a rounding above the largest; reference and kernel cut it off alike.
        scaled = tl.clamp(values * inverse[:, None], -_E4M3_MAX, _E4M3_MAX, propagate_nan=_ALL_NAN)
        quantized = scaled.to(tl.float8e4nv)
        for entry in range(first, last):
            target = tl.load(targets + entry).to(tl.int64)
            tl.store(out + target * out_stride * UNIT + column, quantized, mask=inside)
            tl.store(scales + target * scale_stride + group, scale, mask=some)


@triton.jit(do_not_specialize=["width", "src_stride", "out_stride", "scale_stride"])
def _spread_dequantized(
    src,
    src_stride,
    scales,
    scale_stride,
    offsets,
    targets,
    out,
    out_stride,
    width,
    UNIT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(offsets + row)
    last = tl.load(offsets + row + 1)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = column < width * UNIT
    if first < last:
        values = tl.load(src + row * src_stride * UNIT + column, mask=inside)
        some = group * _GROUP < width * UNIT
        scale = tl.load(scales + row * scale_stride + group, mask=some, other=0.0)
        values = (values.to(tl.float32) * scale[:, None]).to(out.dtype.element_ty)
        for entry in range(first, last):
            target = tl.load(targets + entry).to(tl.int64)
            tl.store(out + target * out_stride * UNIT + column, values, mask=inside)


def _unit(*counts: int, limit: int) -> int:
    """The largest power of two up to `limit` that divides every count."""
    unit = limit
    while unit > 1 and any(count % unit for count in counts):
        unit //= 2
    return unit


def _blocks(width: int, itemsize: int, most_bytes: int) -> tuple[int, int, int]:
    """(columns a program moves, programs a row, warps), for a row of `width` columns."""
    block = min(most_bytes // itemsize, max(16, 1 << (width - 1).bit_length()))
    return block, -(-width // block), max(1, block * itemsize // BYTES_A_WARP)


def _groups(width: int, most: int) -> tuple[int, int]:
    """(groups a program moves, programs a row), for a row of `width` columns."""
    groups = min(most, 1 << (-(-width // GROUP) - 1).bit_length())
    return groups, -(-width // (groups * GROUP))


def spread(
    src: torch.Tensor, offsets: torch.Tensor, targets: torch.Tensor, out: torch.Tensor
) -> None:
    """`rows.spread` on the device: src [N, H], offsets [N + 1], targets [M], out [>= M, H]."""
    if src.element_size() == 1:  # bits move as they are; fp8 types are not known to every GPU
        src, out = src.view(torch.uint8), out.view(torch.uint8)
    n, width = src.shape
    unit = _unit(width, src.stride(0), out.stride(0), limit=max(1, 16 // src.element_size()))
    block, per_row, warps = _blocks(width, src.element_size(), SPREAD_BYTES)
    _spread[(n, per_row)](
        src,
        src.stride(0) // unit,
        offsets,
        targets,
        out,
        out.stride(0) // unit,
        width // unit,
        UNIT=unit,
        BLOCK=block,
        num_warps=warps,
    )


def collect(
    src: torch.Tensor, offsets: torch.Tensor, sources: torch.Tensor, out: torch.Tensor
) -> None:
    """`rows.collect` on the device: src [M, H], offsets [N + 1], sources [M], out [N, H]."""
    n, width = out.shape
    unit = _unit(width, src.stride(0), out.stride(0), limit=max(1, 16 // src.element_size()))
    block, per_row, warps = _blocks(width, src.element_size(), COLLECT_BYTES)
    _collect[(n, per_row)](
        src,
        src.stride(0) // unit,
        offsets,
        sources,
        out,
        out.stride(0) // unit,
        width // unit,
        UNIT=unit,
        BLOCK=block,
        num_warps=warps,
    )


def spread_quantized(
    src: torch.Tensor,
    offsets: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """`rows.spread_quantized` on the device: out [>= M, H] e4m3, scales [>= M, ceil(H / 128)]."""
    n, width = src.shape
    unit = _unit(width, src.stride(0), out.stride(0), limit=16)
    groups, per_row = _groups(width, QUANTIZED_GROUPS)
    _spread_quantized[(n, per_row)](
        src,
        src.stride(0) // unit,
        offsets,
        targets,
        out,
        out.stride(0) // unit,
        scales,
        scales.stride(0),
        width // unit,
        UNIT=unit,
        GROUPS=groups,
        num_warps=QUANTIZED_WARPS,
    )


def spread_dequantized(
    src: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`rows.spread_dequantized` on the device: src [N, H] e4m3, scales [N, ceil(H / 128)]."""
    n, width = src.shape
    unit = _unit(width, src.stride(0), out.stride(0), limit=16)
    groups, per_row = _groups(width, DEQUANTIZED_GROUPS)
    _spread_dequantized[(n, per_row)](
        src,
        src.stride(0) // unit,
        scales,
        scales.stride(0),
        offsets,
        targets,
        out,
        out.stride(0) // unit,
        width // unit,
        UNIT=unit,
        GROUPS=groups,
        num_warps=DEQUANTIZED_WARPS,
    )
