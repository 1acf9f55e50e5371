"""Collectives that upstream calls as `torch.distributed.X(..., group=g)`, sent over two levels.

Where upstream has no place for collectives of one's own, the patched module's `torch` becomes the
`proxy` here, and its `dist_*_func` the functions: they look at the group's axis, and hand to `comm`
what a room has asked for (`send`) and torch everything else, unchanged. What is not contiguous, and
lists of tensors, stay with torch.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa.comm import collectives
from megatron.efa.comm.choose import Mode
from megatron.efa.groups import TwoLevel, axis_of, two_level

_asked: dict[str, tuple[Mode, str]] = {}
"""Mode and purpose by axis."""


def send(axes: Iterable[str], mode: Mode, purpose: str) -> None:
    """From now on send collectives on groups of `axes` by `mode`, over parts of `purpose`."""
    for axis in axes:
        if mode == "off":
            _asked.pop(axis, None)
        else:
            _asked[axis] = (mode, purpose)


class _Torch:
    """torch, but for three functions of `torch.distributed`."""

    def __init__(self) -> None:
        self.distributed = _Distributed()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Distributed:
    def __getattr__(self, name: str) -> Any:
        return _OURS.get(name) or getattr(dist, name)


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """As torch.distributed.all_reduce."""
    if (way := _way(group, tensor)) is None:
        return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    two, mode = way
    return collectives.all_reduce(tensor, two, op, async_op, mode=mode)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """As torch.distributed.all_gather_into_tensor."""
    if (way := _way(group, output_tensor, input_tensor)) is None:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    two, mode = way
    return collectives.all_gather(output_tensor, input_tensor, two, async_op, mode)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """As torch.distributed.reduce_scatter_tensor."""
    if (way := _way(group, output, input)) is None:
        return dist.reduce_scatter_tensor(output, input, op, group, async_op)
    two, mode = way
    return collectives.reduce_scatter(output, input, two, op, async_op, mode=mode)


_OURS = {
    "all_reduce": all_reduce,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
}
proxy = _Torch()


def _way(group: Any, *tensors: torch.Tensor) -> tuple[TwoLevel, Mode] | None:
    """The parts that a collective of `group` goes over; None where torch is to do it."""
    if not _asked or group is None:
        return None
    asked = _asked.get(axis_of(group))
    if asked is None or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    two = two_level(group, asked[1])
    return (two, asked[0]) if two.spans_nodes else None
