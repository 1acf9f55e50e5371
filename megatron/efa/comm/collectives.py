"""Collectives on a two-level group, with the results of torch.distributed's on the flat one.

`two` is `groups.two_level(group, purpose)`, and `mode` of `choose.Mode`. Tensors are contiguous, on
one device, of any dtype. As with torch, every member must make the same calls in the same order,
with the same sizes. With `async_op` each returns a `Handle`, else None.

Sums are made in the node in rank order, then over the nodes in their order, so that equal inputs
give equal bits; with `fp32`, 16-bit floats are added, and partial sums sent between nodes, in fp32,
and rounded once. Other reductions than SUM, AVG, MIN and MAX keep to the flat group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa.comm import algorithms, choose, drive
from megatron.efa.comm.algorithms import Reduction
from megatron.efa.comm.choose import Mode
from megatron.efa.comm.drive import Handle
from megatron.efa.comm.transfers import AVG, OPS, SUM
from megatron.efa.errors import EfaError
from megatron.efa.groups import TwoLevel


def all_reduce(
    tensor: torch.Tensor,
    two: TwoLevel,
    op: Any = SUM,
    async_op: bool = False,
    fp32: bool = False,
    mode: Mode = "auto",
) -> Handle | None:
    """Reduce `tensor`, of any shape, over the group, in place."""
    _check("all_reduce", two, op, tensor)
    if not tensor.numel():
        return _nothing(async_op)
    mode = mode if op in OPS else "off"
    plan = choose.plan(two, tensor.nbytes, "all_reduce", mode, tensor.is_cuda)
    how, ranks = Reduction(op, two, tensor, fp32), two.flat.size()
    if not plan.two_level and not (how.wide and ranks > 1 and op in (SUM, AVG)):
        return dist.all_reduce(tensor, op=op, group=two.flat, async_op=async_op)
    stage = algorithms.all_reduce if plan.two_level else algorithms.flat_all_reduce
    pieces = [
        algorithms.padded(tensor.view(-1)[part], ranks, lambda whole: stage(whole, two, how))
        for part in choose.cut(tensor.numel(), plan.pieces, ranks)
    ]
    return drive.launch(two, pieces, [tensor], async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    two: TwoLevel,
    op: Any = SUM,
    async_op: bool = False,
    fp32: bool = False,
    mode: Mode = "auto",
) -> Handle | None:
    """Reduce `input` (R times as many elements as `output`); rank r keeps its r-th part.

    `output` may be that part of `input`.
    """
    _check("reduce_scatter", two, op, output, input)
    _check_parts("reduce_scatter", "input", input, "output", output, two)
    if not output.numel():
        return _nothing(async_op)
    mode = mode if op in OPS else "off"
    plan = choose.plan(two, input.nbytes, "reduce_scatter", mode, input.is_cuda)
    how, ranks = Reduction(op, two, input, fp32), two.flat.size()
    flat_output, flat_input = output.view(-1), input.view(-1)
    if plan.two_level:
        pieces = [
            algorithms.reduce_scatter(flat_output, flat_input, columns, two, how)
            for columns in choose.cut(output.numel(), plan.pieces)
        ]
    elif how.wide and ranks > 1 and op in (SUM, AVG):
        pieces = [how.over_flat(flat_output, flat_input, two)]
    else:
        return dist.reduce_scatter_tensor(
            flat_output, flat_input, op=op, group=two.flat, async_op=async_op
        )
    return drive.launch(two, pieces, [output, input], async_op)


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    two: TwoLevel,
    async_op: bool = False,
    mode: Mode = "auto",
) -> Handle | None:
    """Gather the inputs of all ranks into `output` (R times as many elements), in rank order.

    `input` may be this rank's part of `output`.
    """
    _check("all_gather", two, SUM, output, input)
    _check_parts("all_gather", "output", output, "input", input, two)
    if not input.numel():
        return _nothing(async_op)
    plan = choose.plan(two, output.nbytes, "all_gather", mode, output.is_cuda)
    flat_output, flat_input = output.view(-1), input.view(-1)
    if not plan.two_level:
        return dist.all_gather_into_tensor(
            flat_output, flat_input, group=two.flat, async_op=async_op
        )
    pieces = [
        algorithms.all_gather(flat_output, flat_input, columns, two)
        for columns in choose.cut(input.numel(), plan.pieces)
    ]
    return drive.launch(two, pieces, [output, input], async_op)


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    two: TwoLevel,
    async_op: bool = False,
    mode: Mode = "auto",
) -> Handle | None:
    """Send `input_splits[r]` rows of dimension 0 to rank r, get `output_splits[r]` rows from it.

    None for both: equal parts. With splits `auto` keeps to the flat group, since no rank knows what
    the others send, and they must choose alike; and two levels let the host wait for counts.
    """
    _check("all_to_all", two, SUM, output, input)
    ranks = two.flat.size()
    uneven = output_splits is not None or input_splits is not None
    outs = _splits("output", output, output_splits, ranks)
    ins = _splits("input", input, input_splits, ranks)
    mode = "off" if uneven and mode == "auto" else mode
    plan = choose.plan(two, input.nbytes, "all_to_all", mode, input.is_cuda)
    if not plan.two_level:
        return dist.all_to_all_single(
            output, input, *((outs, ins) if uneven else ()), group=two.flat, async_op=async_op
        )
    row = input.shape[1:].numel()
    stage = algorithms.all_to_all(
        output.view(-1), input.view(-1), [n * row for n in outs], [n * row for n in ins], two
    )
    return drive.launch(two, [stage], [output, input], async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int,
    two: TwoLevel,
    async_op: bool = False,
    mode: Mode = "auto",
) -> Handle | None:
    """Give all members global rank `src`'s `tensor`, of any shape, in place."""
    _check("broadcast", two, SUM, tensor)
    if not tensor.numel():
        return _nothing(async_op)
    plan = choose.plan(two, tensor.nbytes, "broadcast", mode, tensor.is_cuda)
    if not plan.two_level:
        return dist.broadcast(tensor, src=src, group=two.flat, async_op=async_op)
    if all(src not in block for block in two.shape.blocks):
        raise EfaError(f"broadcast: rank {src} is not in the group of {two.flat.size()} ranks")
    unit = two.per_node
    pieces = [
        algorithms.padded(
            tensor.view(-1)[part], unit, lambda whole: algorithms.broadcast(whole, src, two)
        )
        for part in choose.cut(tensor.numel(), plan.pieces, unit)
    ]
    return drive.launch(two, pieces, [tensor], async_op)


def _nothing(async_op: bool) -> Handle | None:
    return Handle() if async_op else None


def _check(name: str, two: TwoLevel, op: Any, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise EfaError(
                f"{name}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
                "is not contiguous: give a contiguous one"
            )
    first = tensors[0]
    if any((t.dtype, t.device) != (first.dtype, first.device) for t in tensors):
        raise EfaError(
            f"{name}: tensors differ: {', '.join(f'{t.dtype} on {t.device}' for t in tensors)}"
        )
    if op == AVG and not (first.is_floating_point() or first.is_complex()):
        raise EfaError(f"{name}: there is no mean of {first.dtype}: reduce with SUM and divide")


def _check_parts(
    name: str, long: str, whole: torch.Tensor, short: str, part: torch.Tensor, two: TwoLevel
) -> None:
    ranks = two.flat.size()
    if whole.numel() != ranks * part.numel():
        raise EfaError(
            f"{name}: {long} has {whole.numel()} elements and {short} {part.numel()}: a group of "
            f"{ranks} ranks needs {ranks} times as many"
        )


def _splits(name: str, tensor: torch.Tensor, splits: Sequence[int] | None, ranks: int) -> list[int]:
    rows = tensor.shape[0]
    if splits is None and rows % ranks:
        raise EfaError(f"all_to_all: {rows} rows of {name} do not divide among {ranks} ranks")
    parts = [rows // ranks] * ranks if splits is None else [int(count) for count in splits]
    if len(parts) != ranks or sum(parts) != rows or min(parts) < 0:
        raise EfaError(
            f"all_to_all: {name}_splits {parts} do not add up to {rows} rows for {ranks} ranks"
        )
    return parts
