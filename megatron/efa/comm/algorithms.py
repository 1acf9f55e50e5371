"""The two-level collectives on a group of N nodes with P members each, R = N P ranks.

Rank r of the group is member r % P of node r // P. For a message of S bytes, each rank sends

    reduce-scatter    (P-1)/P S in its node, then (N-1)/N S/P along its rail
    all-gather        (N-1)/N S/P along its rail, then (P-1)/P S in its node
    all-reduce        both

and no algorithm sends less out of a node: what leaves is the P (N-1)/N S/P = (N-1)/N S bytes that
N nodes, each taken as one rank, must send. A flat ring sends (R-1)/R S.

Each function is a generator (`transfers.Stage`) for one piece of a message. Pieces are cut so that
they are independent; `drive` runs the rail stage of one beside the node stage of the next.
"""

from collections.abc import Callable, Sequence

import torch

from megatron.efa.comm import transfers
from megatron.efa.comm.transfers import AVG, SUM, Stage
from megatron.efa.groups import TwoLevel


class Reduction:
    """How one collective reduces."""

    def __init__(self, op: object, two: TwoLevel, tensor: torch.Tensor, fp32: bool) -> None:
        self.wide = fp32 and tensor.is_floating_point() and tensor.element_size() < 4
        """Whether sums are made, and cross the network, in fp32: rounded once, at the end."""
        self.exchange = not tensor.is_cuda
        averages = op == AVG
        self.op = SUM if averages and (self.exchange or self.wide) else op
        self.divisor = two.flat.size() if averages and self.op == SUM else 1
        self.dtype = torch.float32 if self.wide else tensor.dtype
        """Of sums."""

    def in_node(self, output: torch.Tensor, input: torch.Tensor, two: TwoLevel) -> Stage:
        """Reduce-scatter in the node: `output`, of `self.dtype`, is what goes on the rail."""
        return transfers.reduce_scatter(
            output, input, two.intra, self.op, self.exchange or self.wide, dtype=self.dtype
        )

    def over_flat(self, output: torch.Tensor, input: torch.Tensor, two: TwoLevel) -> Stage:
        """Reduce-scatter over the flat group, by slices, so that sums can be in fp32."""
        return transfers.reduce_scatter(
            output, input, two.flat, self.op, True, self.divisor, self.dtype
        )


def all_reduce(tensor: torch.Tensor, two: TwoLevel, how: Reduction) -> Stage:
    """Reduce `tensor` [R*m] in place."""
    mine = tensor.view(two.per_node, -1)[two.index]  # [N*m]
    part = torch.empty_like(mine, dtype=how.dtype) if how.wide else mine
    yield from how.in_node(part, tensor, two)
    if how.exchange:
        cell = mine.view(two.nodes, -1)[two.node]  # [m]
        yield from transfers.reduce_scatter(cell, part, two.rail, how.op, True, how.divisor)
        yield transfers.all_gather(mine, cell, two.rail)
    else:
        yield transfers.all_reduce(part, two.rail, how.op)
        if how.divisor != 1:
            part.div_(how.divisor)
        if part is not mine:
            mine.copy_(part)
    yield transfers.all_gather(tensor, mine, two.intra)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    columns: slice,
    two: TwoLevel,
    how: Reduction,
) -> Stage:
    """Reduce the `columns` of every chunk of `input` [R*c] to `output` [c].

    Chunks come node by node, and a node's members must first get theirs of all nodes; that order
    is made by the copy that also makes a piece contiguous, so it costs no memory but a piece.
    """
    chunks = input.view(two.nodes, two.per_node, -1)[:, :, columns]
    packed = chunks.transpose(0, 1).reshape(-1)  # [P*N*w]
    part = packed.new_empty(packed.numel() // two.per_node, dtype=how.dtype)  # [N*w]
    yield from how.in_node(part, packed, two)
    yield from transfers.reduce_scatter(
        output[columns], part, two.rail, how.op, how.exchange, how.divisor
    )


def all_gather(output: torch.Tensor, input: torch.Tensor, columns: slice, two: TwoLevel) -> Stage:
    """Gather the `columns` of all inputs [c] into those of every chunk of `output` [R*c]."""
    piece = input[columns]
    rail = piece.new_empty(two.nodes * piece.numel())  # [N*w]
    yield transfers.all_gather(rail, piece, two.rail)
    packed = piece.new_empty(two.per_node * rail.numel())  # [P*N*w]
    yield transfers.all_gather(packed, rail, two.intra)
    chunks = output.view(two.nodes, two.per_node, -1)[:, :, columns]
    chunks.copy_(packed.view(two.per_node, two.nodes, -1).transpose(0, 1))


def broadcast(tensor: torch.Tensor, src: int, two: TwoLevel) -> Stage:
    """Send global rank `src`'s `tensor` [P*m] to all: a slice a rail, then in each node."""
    mine = tensor.view(two.per_node, -1)[two.index]
    home = next(i for i, block in enumerate(two.shape.blocks) if src in block)
    if two.node == home:
        whole = tensor if two.shape.blocks[home][two.index] == src else None
        yield transfers.scatter(mine, whole, src, two.intra)
    yield transfers.broadcast(mine, two.shape.blocks[home][two.index], two.rail)
    yield transfers.all_gather(tensor, mine, two.intra)


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
    two: TwoLevel,
) -> Stage:
    """Send `input_splits[r]` elements to rank r of the group, get `output_splits[r]` from it.

    What is for member q of any node goes to member q of this node first, and then along its rail:
    N-1 messages leave a rank instead of R-P. How much of it the others of the node have, they say.
    """
    nodes, per_node = two.nodes, two.per_node
    # [P, N]: for member q of each node
    counts = torch.tensor(input_splits, dtype=torch.int64).view(nodes, per_node).T.contiguous()
    theirs = counts.to(input.device)  # from member p of this node, for this rail's nodes
    asked, theirs = theirs, torch.empty_like(theirs)
    yield transfers.all_to_all(theirs, asked, two.intra)
    held = theirs.tolist()  # [P][N]

    parts = input.split(list(input_splits))
    sent = torch.cat([parts[n * per_node + q] for q in range(per_node) for n in range(nodes)])
    gathered = input.new_empty(sum(map(sum, held)))
    yield transfers.all_to_all(
        gathered, sent, two.intra, [sum(row) for row in held], counts.sum(dim=1).tolist()
    )
    parts = gathered.split([count for row in held for count in row])
    sent = torch.cat([parts[p * nodes + n] for n in range(nodes) for p in range(per_node)])
    from_nodes = [sum(output_splits[n * per_node : (n + 1) * per_node]) for n in range(nodes)]
    to_nodes = [sum(row[n] for row in held) for n in range(nodes)]
    yield transfers.all_to_all(output, sent, two.rail, from_nodes, to_nodes)


def flat_all_reduce(tensor: torch.Tensor, two: TwoLevel, how: Reduction) -> Stage:
    """`tensor` [R*m] in place, with sums in fp32 over the flat group."""
    group = two.flat
    mine = tensor.view(group.size(), -1)[group.rank()]
    yield from how.over_flat(mine, tensor, two)
    yield transfers.all_gather(tensor, mine, group)


def padded(tensor: torch.Tensor, unit: int, stage: Callable[[torch.Tensor], Stage]) -> Stage:
    """Run an in-place `stage` on `tensor`, lengthened by zeros to a multiple of `unit` elements."""
    lacking = -tensor.numel() % unit
    if not lacking:
        yield from stage(tensor)
        return
    whole = torch.cat([tensor, tensor.new_zeros(lacking)])
    yield from stage(whole)
    tensor.copy_(whole[: tensor.numel()])
