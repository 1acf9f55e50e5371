"""The Triton kernels that turn a mask into row lists. `kernels.py` checks arguments; call that.

Shapes: N rows, D destinations, M marks. Two launches, nothing waits for the host: the first counts
the marks of each block of rows and destination; in the second every block sums the counts of the
blocks before it (they are few and lie in the cache) and writes its own part.
"""

import torch
import triton
import triton.language as tl

MARKS = 1024  # of the mask that a program holds, 8 a thread,
LEAST_ROWS = 32  # or these rows of it, for every block of rows reads the counts of all blocks
MARKS_A_WARP, MOST_WARPS = 256, 16
MOST_DESTINATIONS = 256  # 128 bytes of shared memory each: more than this fails on some GPUs


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _marks(
    mask, row_stride, column_stride, first, n, destinations, ROWS: tl.constexpr, D: tl.constexpr
):
    """int32 [ROWS, D] of 0 and 1, zeros outside the mask."""
    row = first + tl.arange(0, ROWS)[:, None]
    destination = tl.arange(0, D)[None, :]
    at = mask + row.to(tl.int64) * row_stride + destination * column_stride
    marks = tl.load(at, mask=(row < n) & (destination < destinations), other=0)
    return (marks != 0).to(tl.int32)


@triton.jit
def _count(
    mask, row_stride, column_stride, n, destinations, counts, ROWS: tl.constexpr, D: tl.constexpr
):
    block = tl.program_id(0)
    marks = _marks(mask, row_stride, column_stride, block * ROWS, n, destinations, ROWS, D)
    tl.store(counts + block * D + tl.arange(0, D), tl.reduce(marks, 0, _plus))


@triton.jit
def _fill(
    mask,
    row_stride,
    column_stride,
    n,
    destinations,
    counts,
    blocks,
    offsets,
    targets,
    capacity,
    totals,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    block = tl.program_id(0)
    column = tl.arange(0, D)
    before = tl.full([D], 0, tl.int32)
    total = tl.full([D], 0, tl.int32)
    for start in range(0, blocks, ROWS):
        other = start + tl.arange(0, ROWS)[:, None]
        part = tl.load(counts + other * D + column[None, :], mask=other < blocks, other=0)
        total += tl.reduce(part, 0, _plus)
        before += tl.reduce(tl.where(other < block, part, 0), 0, _plus)
    marks = _marks(mask, row_stride, column_stride, block * ROWS, n, destinations, ROWS, D)
    # Where a destination's part of the targets begins, then where this block's part of it does.
    base = tl.associative_scan(total, 0, _plus) - total + before
    target = base[None, :] + tl.associative_scan(marks, 0, _plus) - marks
    # Entries lie row after row, in a row by destination.
    per_row = tl.reduce(marks, 1, _plus)
    first = tl.reduce(before, 0, _plus) + tl.associative_scan(per_row, 0, _plus) - per_row
    entry = first[:, None] + tl.associative_scan(marks, 1, _plus) - marks
    tl.store(targets + entry, target, mask=(marks != 0) & (entry < capacity))
    row = block * ROWS + tl.arange(0, ROWS)
    tl.store(offsets + row + 1, first + per_row, mask=row < n)
    if block == 0:
        tl.store(offsets, 0)
        tl.store(totals + column, total, mask=column < destinations)


def lists_of(
    mask: torch.Tensor, offsets: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
) -> None:
    """`lists.lists_of` on the device: mask [N, D] bool with N, D > 0; the rest int32."""
    n, destinations = mask.shape
    d = max(2, 1 << (destinations - 1).bit_length())
    rows = max(LEAST_ROWS, MARKS // d)
    warps = min(MOST_WARPS, max(1, rows * d // MARKS_A_WARP))
    blocks = -(-n // rows)
    parts = torch.empty(blocks, d, dtype=torch.int32, device=mask.device)
    marks = mask.view(torch.uint8)
    shape = (marks, marks.stride(0), marks.stride(1), n, destinations, parts)
    _count[(blocks,)](*shape, ROWS=rows, D=d, num_warps=warps)
    _fill[(blocks,)](
        *shape, blocks, offsets, targets, targets.numel(), counts, ROWS=rows, D=d, num_warps=warps
    )
