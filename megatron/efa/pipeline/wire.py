"""One way from a stage to a neighbour: sends or receives tensors, whole or sliced.

With tensor parallelism without sequence parallelism all T ranks of a stage hold the same
activation, and upstream sends it T times. Where the stages lie on different nodes, each rank sends
a T-th of it, on its own rail, and the receivers gather the slices within their node. A large
message is cut into pieces, each of which is sliced; a piece is gathered while the next ones are
still on the rail:

    rail       piece 0   piece 1   piece 2
    node                 gather 0  gather 1  gather 2

A slice is received where it belongs in the tensor, so nothing is copied.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa.comm import choose, transfers

Part = tuple[torch.Tensor, torch.Tensor]
"""A piece [n] of the flat tensor, and this rank's slice of it [n / T]."""


class Sent:
    """A tensor that is being sent, and its works."""

    def __init__(self, works: Sequence[Any], tensor: torch.Tensor, kept: bool) -> None:
        self._works, self._tensor, self._kept = works, tensor, kept

    def wait(self) -> None:
        """Return once the tensor may be let go of, which `kept` ones may at once."""
        if not self._kept:
            self.settle()

    def settle(self) -> None:
        """Return once it has been sent (over NCCL: have the current stream wait for that)."""
        for work in self._works:
            work.wait()
        self._works, self._tensor = (), None


class Received:
    """A tensor that is being received, piece by piece."""

    def __init__(self, parts: Sequence[Part], works: Sequence[Any], gather: Any) -> None:
        self._parts, self._works, self._gather = parts, works, gather

    def wait(self) -> None:
        """Return once the tensor is complete (over NCCL: once the current stream will see it).

        All ranks that gather must wait for their tensors in the same order, as the schedules do.
        The gathers start here and not earlier: behind a message that does not come yet they would
        hold up everything launched after them where CUDA has one queue
        (CUDA_DEVICE_MAX_CONNECTIONS=1), and so perhaps what the sender waits for.
        """
        gathers = []
        for (piece, mine), work in zip(self._parts, self._works, strict=True):
            work.wait()
            if mine is not piece:
                gathers.append(transfers.all_gather(piece, mine, self._gather))
        for gather in gathers:
            gather.wait()
        self._parts = self._works = ()


class Wire:
    """Carries tensors one way between this rank and global rank `peer`, in order.

    `group` holds the two, and `copies`, if not None, the ranks of this stage that have the same
    tensors: each of them has a wire to a peer of its own.
    """

    def __init__(self, group: Any, peer: int, copies: Any | None) -> None:
        self._group, self._peer, self._copies = group, peer, copies
        self._last: Sent | None = None

    def send(self, tensor: torch.Tensor) -> Sent:
        """Start sending `tensor`, contiguous, of any shape.

        In training it is kept until the next one is sent, so nobody need wait for it: the end of a
        step waits for all stages. An evaluation may be the last thing that a rank does.
        """
        if self._last is not None:
            self._last.settle()
        parts = self.parts(tensor.detach())
        works = [dist.isend(mine, self._peer, group=self._group) for _, mine in parts]
        self._last = Sent(works, tensor.detach(), kept=torch.is_grad_enabled())
        return self._last

    def receive(self, tensor: torch.Tensor) -> Received:
        """Start filling `tensor`, contiguous, with what the peer sends."""
        parts = self.parts(tensor.detach())
        works = [dist.irecv(mine, self._peer, group=self._group) for _, mine in parts]
        return Received(parts, works, self._copies)

    def parts(self, tensor: torch.Tensor) -> list[Part]:
        """Cut `tensor` into pieces and slices; sender and receiver cut alike, knowing its size.

        Whole if nobody else has it, or if it does not divide: cutting a message that is not sliced
        would gain nothing, since no local work follows its pieces.
        """
        ranks = 1 if self._copies is None else self._copies.size()
        if ranks == 1 or tensor.numel() % ranks:
            return [(tensor, tensor)]
        flat, costs = tensor.view(-1), choose.costs_of(ranks, tensor.is_cuda)
        pieces = choose.cut(flat.numel(), choose.pieces(tensor.nbytes // ranks, costs), ranks)
        return [(flat[p], flat[p].view(ranks, -1)[self._copies.rank()]) for p in pieces]
