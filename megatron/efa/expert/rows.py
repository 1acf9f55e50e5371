"""Moving rows by lists, in plain PyTorch: the reference for the kernels, and what serves CPUs.

Shapes: N rows with lists, M entries of all lists together, H values a row, G = ceil(H / 128).
Lists are CSR: row i has entries offsets[i] .. offsets[i + 1] of an index; offsets int32 [N + 1],
index int32 [M]. Offsets need not begin at 0: a chunk of rows is a slice of them. Rows may lie apart
(a slice of wider rows), values of a row may not.
"""

import torch

GROUP = 128
"""Values under one scale, as in DeepSeek-V3's activations (arXiv:2412.19437 section 3.3.2)."""
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
E4M3_MAX_INVERSE = 1 / E4M3_MAX
SMALLEST_AMAX = E4M3_MAX * 2.0**-126  # keeps a scale a normal fp32 number, also for rows of zeros


def spread(
    src: torch.Tensor, offsets: torch.Tensor, targets: torch.Tensor, out: torch.Tensor
) -> None:
    """out[targets[j]] = src[i] for every entry j of row i; other rows of `out` stay as they are.

    src [N, H], out [.., H] of the same dtype (any). Targets must differ.
    """
    rows, entries = _entries(offsets)
    out[targets[entries].long()] = src[rows]


def collect(
    src: torch.Tensor, offsets: torch.Tensor, sources: torch.Tensor, out: torch.Tensor
) -> None:
    """out[i] = sum of src[sources[j]] over the entries j of row i, in their order; zeros for none.

    src [.., H], out [N, H], each fp32, bf16 or fp16. Summed in fp32, rounded once.
    """
    rows, entries = _entries(offsets)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    # index_add_ sums in order on CPUs; on GPUs only with deterministic algorithms.
    total.index_add_(0, rows, src[sources[entries].long()].float())
    out.copy_(total)


def spread_quantized(
    src: torch.Tensor,
    offsets: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """As `spread`, into e4m3 with one scale per 128 values: value = out * scale.

    src [N, H] fp32, bf16 or fp16; out [.., H] float8_e4m3fn; scales [.., G] fp32. Scale: the
    largest magnitude of the group / 448, so that it becomes the largest e4m3 number. A group with
    a value that is not finite has a scale that is not finite.
    """
    quantized, scale = quantize(src)
    spread(quantized.view(torch.uint8), offsets, targets, out.view(torch.uint8))
    spread(scale, offsets, targets, scales)


def spread_dequantized(
    src: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As `spread`, from float8_e4m3fn [N, H] with scales fp32 [N, G] to fp32, bf16 or fp16."""
    width = src.shape[1]
    values = src.float() * scales.repeat_interleave(GROUP, dim=1)[:, :width]
    spread(values.to(out.dtype), offsets, targets, out)


def quantize(src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [N, H], scales fp32 [N, G]) of src [N, H]; see `spread_quantized`."""
    n, width = src.shape
    groups = -(-width // GROUP)
    padded = torch.nn.functional.pad(src.float(), (0, groups * GROUP - width))
    values = padded.view(n, groups, GROUP)
    # Times 1 / 448, for a division by a number is that on GPUs and is not on CPUs.
    scale = values.abs().amax(-1).clamp(min=SMALLEST_AMAX) * E4M3_MAX_INVERSE
    # A value may be a rounding above the largest: beyond it torch makes NaN.
    scaled = (values * scale.reciprocal()[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(n, groups * GROUP)[:, :width].contiguous(), scale


def _entries(offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of each entry, entry), int64, of all lists in order; waits for the device."""
    counts = offsets.diff().long()
    rows = torch.repeat_interleave(counts)
    first = int(offsets[0]) if len(offsets) else 0
    return rows, torch.arange(first, first + len(rows), device=offsets.device)
