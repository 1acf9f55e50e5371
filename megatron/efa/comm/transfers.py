"""One stage of a two-level collective: a transfer within one process group, and the sum after it.

A stage is a generator that yields each transfer's work and goes on, with local work or the next
transfer, once that work has finished; `drive` says who waits, and how. Every byte that these
collectives move is handed to torch here.

Over NCCL a stage is the native collective. Over gloo it is not: gloo's reduce-scatter is an
all-reduce, which sends twice what it must, and sums in an order of its own. There the slices are
exchanged by an all-to-all and summed here, in rank order, so that the result does not depend on
timing and the bytes sent are the fewest possible. The same is done where a sum of 16-bit numbers
is wanted in fp32, as in upstream's `--ddp-reduce-scatter-with-fp32-accumulation`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

Stage = Iterator[Any]
"""Yields works (objects with `wait()`)."""

SUM, AVG, MIN, MAX = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
)
OPS = (SUM, AVG, MIN, MAX)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Any,
    op: Any = SUM,
    exchange: bool = False,
    divisor: int = 1,
    dtype: torch.dtype | None = None,
) -> Stage:
    """Reduce the [k*m] inputs of `group`'s k members; member i keeps slice i in `output` [m].

    With `exchange` by slices and sums here, in rank order and in `dtype` (default: the input's),
    of SUM, MIN and MAX; else `dtype` is the input's. `divisor` then divides. `output` may be a
    slice of `input`.
    """
    if exchange:
        rows = torch.empty_like(input).view(group.size(), -1)
        if input.is_cuda:
            yield all_to_all(rows.view(-1), input, group)
        else:
            yield from swap(rows, input.view(group.size(), -1), group)
        reduce_rows(output, rows, op, divisor, dtype or input.dtype)
        return
    target = output if output.dtype == input.dtype else torch.empty_like(output, dtype=input.dtype)
    yield dist.reduce_scatter_tensor(target, input, op=op, group=group, async_op=True)
    if divisor != 1:
        target.div_(divisor)
    if target is not output:
        output.copy_(target)


def swap(rows: torch.Tensor, slices: torch.Tensor, group: Any) -> Stage:
    """Send row i of `slices` [k, m] to member i, and get row i of `rows` from it.

    With one partner after another, as in a ring: gloo's all-to-all sends to all at once, and where
    several senders meet at a node's link they hold each other up.
    """
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    rows[me].copy_(slices[me])
    for step in range(1, len(ranks)):
        to, from_ = (me + step) % len(ranks), (me - step) % len(ranks)
        received = dist.irecv(rows[from_].view(torch.uint8), ranks[from_], group)
        yield Both(dist.isend(slices[to].view(torch.uint8), ranks[to], group), received)


class Both:
    """A transfer out and one in."""

    def __init__(self, *works: Any) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def reduce_rows(
    output: torch.Tensor, rows: torch.Tensor, op: Any, divisor: int, dtype: torch.dtype
) -> None:
    """Reduce `rows` [k, m] in `dtype` from the first to the last into `output` [m], then divide.

    Spoils `rows` if `dtype` is theirs.
    """
    total = output.copy_(rows[0]) if output.dtype == dtype else rows[0].to(dtype)
    for row in rows[1:]:
        _into(op)(total, row)
    if divisor != 1:
        total.div_(divisor)
    if total is not output:
        output.copy_(total)


def _into(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if op == SUM:
        return torch.Tensor.add_
    extreme = torch.minimum if op == MIN else torch.maximum
    return lambda total, row: extreme(total, row, out=total)


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Any,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> Any:
    """Start an all-to-all of contiguous tensors; splits count elements. Returns the work.

    As bytes, since gloo knows few dtypes.
    """
    size = input.element_size()
    scaled = [
        None if splits is None else [count * size for count in splits]
        for splits in (output_splits, input_splits)
    ]
    return dist.all_to_all_single(
        output.view(-1).view(torch.uint8),
        input.view(-1).view(torch.uint8),
        *scaled,
        group=group,
        async_op=True,
    )


def all_gather(output: torch.Tensor, input: torch.Tensor, group: Any) -> Any:
    """Start gathering the [m] inputs of k members into `output` [k*m]. Returns the work.

    `input` may be this member's slice of `output`.
    """
    return dist.all_gather_into_tensor(
        output.view(torch.uint8), input.view(torch.uint8), group=group, async_op=True
    )


def all_reduce(tensor: torch.Tensor, group: Any, op: Any = SUM) -> Any:
    """Start reducing `tensor` in place with the backend's own collective. Returns the work."""
    return dist.all_reduce(tensor, op=op, group=group, async_op=True)


def scatter(output: torch.Tensor, input: torch.Tensor | None, src: int, group: Any) -> Any:
    """Start handing slice i of rank `src`'s `input` [k*m] to member i. Returns the work.

    `input` is None on the other ranks.
    """
    parts = None
    if input is not None:
        parts = list(input.view(torch.uint8).view(group.size(), -1))
    return dist.scatter(output.view(torch.uint8), parts, src=src, group=group, async_op=True)


def broadcast(tensor: torch.Tensor, src: int, group: Any) -> Any:
    """Start sending global rank `src`'s `tensor` to all members. Returns the work."""
    return dist.broadcast(tensor.view(torch.uint8), src=src, group=group, async_op=True)


def exchange(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Any,
    received: Sequence[int],
    sent: Sequence[int],
    by_pairs: bool = False,
) -> Stage:
    """Send `sent[i]` rows of `input` [.., w] to member i, get `received[i]` rows of `output`.

    Both contiguous, rows in the order of members. `by_pairs`: on CPUs with one partner after
    another, as `swap` does between nodes.
    """
    if input.is_cuda or not by_pairs:
        width = input.shape[1]
        splits = ([count * width for count in counts] for counts in (received, sent))
        yield all_to_all(output, input, group, *splits)
        return
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    outputs, inputs = output.split(list(received)), input.split(list(sent))
    outputs[me].copy_(inputs[me])
    for step in range(1, len(ranks)):
        to, from_ = (me + step) % len(ranks), (me - step) % len(ranks)
        works = []
        if received[from_]:
            works.append(dist.irecv(outputs[from_].view(torch.uint8), ranks[from_], group))
        if sent[to]:
            works.append(dist.isend(inputs[to].view(torch.uint8), ranks[to], group))
        yield Both(*works)
