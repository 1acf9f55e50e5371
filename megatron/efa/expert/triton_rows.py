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

from megatron.efa.expert.rows import E4M3_MAX, GROUP, SMALLEST_AMAX

# Bytes of a row, or groups of it, that a program moves, and its warps (docs/kernels.md: figures).
SPREAD_BYTES, SPREAD_WARPS = 4096, 4
COLLECT_BYTES, COLLECT_WARPS = 2048, 4
QUANTIZED_GROUPS, QUANTIZED_WARPS = 8, 4

# Constants of a kernel must be constexpr.
_GROUP = tl.constexpr(GROUP)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
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


@triton.jit
def _entry(sources, entry, last):
    """The row that an entry names; any row, here 0, past the end of the list."""
    return tl.load(sources + entry, mask=entry < last, other=0).to(tl.int64)


@triton.jit
def _row(src, step, row, entry, last, column, width):
    """One block of a row; zeros past the end of the list."""
    end = tl.where(entry < last, width, 0)
    return tl.load(src + row * step + column, mask=column < end, other=0.0)


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
    width *= UNIT
    step = src_stride.to(tl.int64) * UNIT
    total = tl.full([BLOCK], 0.0, tl.float32)
    # Four rows are asked for before the first is waited for: without that, the compiler puts each
    # sum right behind its load. The order of the sums is the list's. A zero added past the end of
    # a list changes nothing, since a sum that starts at +0 is never -0.
    for entry in range(first, last, 4):
        row_0 = _entry(sources, entry, last)
        row_1 = _entry(sources, entry + 1, last)
        row_2 = _entry(sources, entry + 2, last)
        row_3 = _entry(sources, entry + 3, last)
        values_0 = _row(src, step, row_0, entry, last, column, width)
        values_1 = _row(src, step, row_1, entry + 1, last, column, width)
        values_2 = _row(src, step, row_2, entry + 2, last, column, width)
        values_3 = _row(src, step, row_3, entry + 3, last, column, width)
        total += values_0.to(tl.float32)
        total += values_1.to(tl.float32)
        total += values_2.to(tl.float32)
        total += values_3.to(tl.float32)
    at = out + row * out_stride * UNIT + column
    tl.store(at, total.to(out.dtype.element_ty), mask=column < width)


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
        scale = tl.div_rn(_larger(amax, _SMALLEST_AMAX), _E4M3_MAX)
        quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
        # A quotient may be one rounding above the largest value, never more.
        quotient = tl.clamp(quotient, -_E4M3_MAX, _E4M3_MAX, propagate_nan=_ALL_NAN)
        quantized = quotient.to(tl.float8e4nv)
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


def _blocks(width: int, block: int) -> tuple[int, int]:
    """(columns a program moves, programs a row): no wider than the row needs, at least a vector."""
    block = min(block, max(16, 1 << (width - 1).bit_length()))
    return block, -(-width // block)


def spread(
    src: torch.Tensor, offsets: torch.Tensor, targets: torch.Tensor, out: torch.Tensor
) -> None:
    """`rows.spread` on the device: src [N, H], offsets [N + 1], targets [M], out [>= M, H]."""
    if src.element_size() == 1:  # bits move as they are; fp8 types are not known to every GPU
        src, out = src.view(torch.uint8), out.view(torch.uint8)
    n, width = src.shape
    unit = _unit(width, src.stride(0), out.stride(0), limit=max(1, 16 // src.element_size()))
    block, per_row = _blocks(width, SPREAD_BYTES // src.element_size())
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
        num_warps=SPREAD_WARPS,
    )


def collect(
    src: torch.Tensor, offsets: torch.Tensor, sources: torch.Tensor, out: torch.Tensor
) -> None:
    """`rows.collect` on the device: src [M, H], offsets [N + 1], sources [M], out [N, H]."""
    n, width = out.shape
    unit = _unit(width, src.stride(0), out.stride(0), limit=max(1, 16 // src.element_size()))
    block, per_row = _blocks(width, COLLECT_BYTES // src.element_size())
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
        num_warps=COLLECT_WARPS,
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
    groups = min(QUANTIZED_GROUPS, max(1, 1 << (-(-width // GROUP) - 1).bit_length()))
    _spread_quantized[(n, -(-width // (groups * GROUP)))](
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
    groups = min(QUANTIZED_GROUPS, max(1, 1 << (-(-width // GROUP) - 1).bit_length()))
    _spread_dequantized[(n, -(-width // (groups * GROUP)))](
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
        num_warps=QUANTIZED_WARPS,
    )
