"""What each rank of `bench collectives` does: every case, flat and on two levels, in turns."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa import comm
from megatron.efa.cluster.current import use
from megatron.efa.cluster.model import Cluster, Link, Node
from megatron.efa.comm import choose
from megatron.efa.emulate import network
from megatron.efa.errors import EfaError
from megatron.efa.groups import TwoLevel, two_level

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ARMS = ("off", "on")
LATENCY = 200e-6
"""Seconds; what a message between two emulated nodes, or two processes, takes at least."""


@dataclass(frozen=True)
class Case:
    collective: choose.Kind
    size: int
    """Bytes of the whole message: what is reduced, or all ranks' parts of what is gathered."""
    dtype: str


@dataclass
class Turns:
    """What one rank saw of one case with one mode; times are those of the machine's one clock."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """Bytes that left the node in each turn, on its first rank; empty without links."""


@dataclass
class Seen:
    """What one rank saw of one case."""

    turns: dict[str, Turns]
    auto: str
    """The mode that `auto` takes on this cluster."""
    pieces: int


def check_names(names: Sequence[str]) -> None:
    """Raise EfaError if one is no collective."""
    for name in names:
        if name not in _CALLS:
            raise EfaError(f"--collectives: there is no {name}, but {', '.join(_CALLS)}")


def measure(
    cases: Sequence[Case], rounds: int, per_node: int, rate: float | None, gpu: bool, meet: Any
) -> list[Seen]:
    """Run on one rank; returns what it saw of each case.

    `rate`: bytes a second of a node's link, None without links. `meet` is a barrier of all ranks
    that uses none. Raises EfaError if two modes disagree.
    """
    torch.set_num_threads(1)
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    nodes = dist.get_world_size() // per_node
    far = None if rate is None else Link(rate / per_node, LATENCY)
    use(Cluster(tuple(Node(f"node{i}", per_node) for i in range(nodes)), far=far))
    two = two_level(dist.group.WORLD, "bench")
    seen = []
    for case in cases:
        seen.append(_measure(case, two, rounds, rate is not None, gpu, meet))
        if dist.get_rank() == 0:
            print(f"{case.collective}, {case.size} bytes: measured {rounds} rounds", flush=True)
    dist.destroy_process_group()
    return seen


def _measure(case: Case, two: TwoLevel, rounds: int, links: bool, gpu: bool, meet: Any) -> Seen:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dtype, device = DTYPES[case.dtype], "cuda" if gpu else "cpu"
    count = max(1, case.size // dtype.itemsize // ranks) * ranks
    random = torch.Generator().manual_seed(rank)
    # Whole numbers: their sums are exact in any order, so that both modes must give the same.
    whole = torch.randint(0, 8, (count,), generator=random).to(dtype).to(device)
    call = _CALLS[case.collective]
    results = [call(whole.clone(), two, mode)() for mode in ARMS]  # which also connects them
    if not torch.equal(*results):
        raise EfaError(f"rank {rank}: {case.collective} of {case.size} bytes: two levels disagree")
    del results
    whole.zero_()  # for the turns: sums that feed on themselves would grow out of the dtype
    turns = {mode: Turns() for mode in ARMS}
    counts = links and rank % two.per_node == 0
    runs = {mode: call(whole, two, mode) for mode in ARMS}
    for round_ in range(rounds):
        for mode in ARMS if round_ % 2 else ARMS[::-1]:
            meet.wait()
            before = network.counters(os.getpid()).sent_bytes if counts else 0
            meet.wait()
            turns[mode].starts.append(time.monotonic())
            runs[mode]()
            if gpu:
                torch.cuda.synchronize()
            turns[mode].ends.append(time.monotonic())
            meet.wait()
            if counts:
                turns[mode].sent.append(network.counters(os.getpid()).sent_bytes - before)
    auto = choose.plan(two, case.size, case.collective, "auto", gpu)
    cut = choose.plan(two, case.size, case.collective, "on", gpu)
    return Seen(turns, "on" if auto.two_level else "off", cut.pieces)


Run = Callable[[], torch.Tensor]


def _all_reduce(whole: torch.Tensor, two: TwoLevel, mode: Any) -> Run:
    def run() -> torch.Tensor:
        comm.all_reduce(whole, two, mode=mode)
        return whole

    return run


def _reduce_scatter(whole: torch.Tensor, two: TwoLevel, mode: Any) -> Run:
    part = torch.empty_like(whole[: len(whole) // two.flat.size()])

    def run() -> torch.Tensor:
        comm.reduce_scatter(part, whole, two, mode=mode)
        return part

    return run


def _all_gather(whole: torch.Tensor, two: TwoLevel, mode: Any) -> Run:
    part = whole[: len(whole) // two.flat.size()].clone()

    def run() -> torch.Tensor:
        comm.all_gather(whole, part, two, mode=mode)
        return whole

    return run


def _all_to_all(whole: torch.Tensor, two: TwoLevel, mode: Any) -> Run:
    output = torch.empty_like(whole)

    def run() -> torch.Tensor:
        comm.all_to_all(output, whole, None, None, two, mode=mode)
        return output

    return run


def _broadcast(whole: torch.Tensor, two: TwoLevel, mode: Any) -> Run:
    def run() -> torch.Tensor:
        comm.broadcast(whole, 0, two, mode=mode)
        return whole

    return run


_CALLS: dict[str, Callable[[torch.Tensor, TwoLevel, Any], Run]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
}
