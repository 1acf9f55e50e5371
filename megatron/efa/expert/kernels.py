"""The row primitives of the expert path, each on the fastest thing at hand: the one choice.

A CUDA tensor goes to a Triton kernel where Triton is installed (e4m3 where the GPU has it, compute
capability 8.9), everything else to the plain PyTorch of `rows.py` and `lists.py`, which say what
each primitive does. All of them write into tensors of the caller's, none is differentiable by
itself: `spread` and `collect` over the same lists are each other's backward. The kernels do not
wait for the device, so nobody looks at the entries: one outside `out` writes outside `out`.
"""

import importlib.util
from types import ModuleType

import torch

from megatron.efa.errors import EfaError
from megatron.efa.expert import lists, rows

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)
_E4M3 = (torch.float8_e4m3fn,)


def spread(
    src: torch.Tensor, offsets: torch.Tensor, targets: torch.Tensor, out: torch.Tensor
) -> None:
    """out[targets[j]] = src[i] for every entry j of row i: read once, written once a target.

    src [N, H] and out [.., H] of one dtype, any; offsets int32 [N + 1], targets int32 [M].
    Raises EfaError for tensors that do not fit together.
    """
    _check_lists("spread", src, offsets, targets, src.shape[0])
    _check_rows("spread", src, out)
    if src.dtype != out.dtype:
        raise EfaError(f"spread: rows are {src.dtype} and go to {out.dtype}: convert them first")
    if src.numel():
        _rows_for(src).spread(src, offsets, targets, out)


def collect(
    src: torch.Tensor, offsets: torch.Tensor, sources: torch.Tensor, out: torch.Tensor
) -> None:
    """out[i] = sum of src[sources[j]] over the entries j of row i, in order; zeros for none.

    src [.., H] and out [N, H], each fp32, bf16 or fp16; summed in fp32, rounded once; offsets int32
    [N + 1], sources int32 [M]. Raises EfaError for tensors that do not fit together.
    """
    _check_lists("collect", src, offsets, sources, out.shape[0])
    _check_rows("collect", src, out)
    _check_dtypes("collect", (src, _SUMMED), (out, _SUMMED))
    if out.numel():
        _rows_for(src).collect(src, offsets, sources, out)


def spread_quantized(
    src: torch.Tensor,
    offsets: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """As `spread`, into e4m3 with one fp32 scale per 128 values: value = out * scale.

    src [N, H] fp32, bf16 or fp16; out [.., H] float8_e4m3fn; scales [.., ceil(H / 128)] fp32.
    Raises EfaError for tensors that do not fit together.
    """
    _check_lists("spread_quantized", src, offsets, targets, src.shape[0])
    _check_rows("spread_quantized", src, out)
    _check_scales("spread_quantized", out, scales)
    _check_dtypes("spread_quantized", (src, _SUMMED), (out, _E4M3))
    if src.numel():
        _rows_for(src, e4m3=True).spread_quantized(src, offsets, targets, out, scales)


def spread_dequantized(
    src: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """As `spread`, from e4m3 with scales to fp32, bf16 or fp16.

    src [N, H] float8_e4m3fn; scales [N, ceil(H / 128)] fp32; out [.., H]. Raises EfaError for
    tensors that do not fit together.
    """
    _check_lists("spread_dequantized", src, offsets, targets, src.shape[0])
    _check_rows("spread_dequantized", src, out)
    _check_scales("spread_dequantized", src, scales)
    _check_dtypes("spread_dequantized", (src, _E4M3), (out, _SUMMED))
    if src.numel():
        _rows_for(src, e4m3=True).spread_dequantized(src, scales, offsets, targets, out)


def lists_of(mask: torch.Tensor, entries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offsets [N + 1], targets [entries], counts [D]), int32, of mask bool [N, D].

    Marks are numbered by destination, then row: with `spread`, the rows for destination 0 come
    first. `entries` is the number of marks or a bound of it (N * top-k); of a bound, the rest of
    the targets has no meaning. Raises EfaError for a mask that is not bool [N, D].
    """
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise EfaError(f"lists_of: a mask is bool [rows, destinations], not {_described(mask)}")
    n, destinations = mask.shape
    offsets = torch.empty(n + 1, dtype=torch.int32, device=mask.device)
    targets = torch.empty(entries, dtype=torch.int32, device=mask.device)
    counts = torch.empty(destinations, dtype=torch.int32, device=mask.device)
    _lists_for(mask).lists_of(mask, offsets, targets, counts)
    return offsets, targets, counts


def _rows_for(tensor: torch.Tensor, e4m3: bool = False) -> ModuleType:
    """The module whose functions take this tensor."""
    if not _on_triton(tensor) or (
        e4m3 and torch.cuda.get_device_capability(tensor.device) < (8, 9)
    ):
        return rows
    from megatron.efa.expert import triton_rows

    return triton_rows


def _lists_for(mask: torch.Tensor) -> ModuleType:
    """The module whose function takes this mask."""
    if not (_on_triton(mask) and mask.numel()):
        return lists
    from megatron.efa.expert import triton_lists

    return triton_lists if mask.shape[1] <= triton_lists.MOST_DESTINATIONS else lists


def _on_triton(tensor: torch.Tensor) -> bool:
    if not (tensor.is_cuda and _HAS_TRITON):
        return False
    if tensor.get_device() != torch.cuda.current_device():  # where Triton launches
        raise EfaError(
            f"rows on {tensor.device} cannot be moved while cuda:{torch.cuda.current_device()} is"
            " the current device: call torch.cuda.set_device first"
        )
    return True


def _check_lists(
    what: str, src: torch.Tensor, offsets: torch.Tensor, index: torch.Tensor, n: int
) -> None:
    for name, tensor in (("offsets", offsets), ("entries", index)):
        if (
            tensor.dtype != torch.int32
            or tensor.dim() != 1
            or not tensor.is_contiguous()
            or tensor.device != src.device
        ):
            raise EfaError(
                f"{what}: {name} are contiguous int32 [n] on {src.device}, not {_described(tensor)}"
            )
    if offsets.numel() != n + 1:
        raise EfaError(f"{what}: {n} rows need {n + 1} offsets, not {offsets.numel()}")


def _check_rows(what: str, src: torch.Tensor, out: torch.Tensor) -> None:
    for name, tensor in (("src", src), ("out", out)):
        if tensor.dim() != 2 or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
            raise EfaError(
                f"{what}: {name} is [rows, width] without gaps in a row, not {_described(tensor)}"
            )
    if src.shape[1] != out.shape[1] or src.device != out.device:
        raise EfaError(f"{what}: src {_described(src)} and out {_described(out)} do not match")


def _check_scales(what: str, rows_of: torch.Tensor, scales: torch.Tensor) -> None:
    groups = -(-rows_of.shape[1] // rows.GROUP)
    if (
        scales.dtype != torch.float32
        or scales.device != rows_of.device
        or scales.shape != (rows_of.shape[0], groups)
        or (groups > 1 and scales.stride(1) != 1)
    ):
        raise EfaError(
            f"{what}: scales are fp32 [{rows_of.shape[0]}, {groups}] on {rows_of.device} without"
            f" gaps in a row, not {_described(scales)}"
        )


def _check_dtypes(what: str, *allowed: tuple[torch.Tensor, tuple[torch.dtype, ...]]) -> None:
    for tensor, dtypes in allowed:
        if tensor.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise EfaError(f"{what}: rows are one of {names}, not {tensor.dtype}")


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())} on {tensor.device}"
