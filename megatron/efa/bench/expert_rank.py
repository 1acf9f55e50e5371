"""What each rank of `bench expert` does: the same step through every dispatcher, in turns.

Shapes: T tokens of this rank, H hidden, E experts, k experts a token, R rows at the local experts.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa.bench import bounds, dispatchers, overlap, routing
from megatron.efa.bench.meter import Meter, asleep
from megatron.efa.emulate import network
from megatron.efa.errors import EfaError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One expert layer with one routing."""

    layer: routing.Layer
    kind: str
    """One of `routing.KINDS`, or the name of `recorded`."""
    recorded: routing.Recorded | None
    hidden: int
    tokens: int
    dtype: str


@dataclass
class Turns:
    """What one rank saw of one arm in one case; times are those of the machine's one clock."""

    arm: dispatchers.Arm
    starts: list[float] = field(default_factory=list)
    middles: list[float] = field(default_factory=list)
    """Ends of forward."""
    ends: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """Bytes that left the node in each turn, on its first rank; empty without links."""
    slept: list[float] = field(default_factory=list)
    """Seconds of each turn in which the rank waited for data; empty where that is not known."""
    messages: int = 0
    payload: int = 0
    busy: overlap.Busy | None = None
    """Of the turn that was recorded, if one was."""


@dataclass
class Seen:
    """What one rank saw of one case."""

    turns: list[Turns]
    rows: list[int]
    """Rows to each node, a token counted once a node."""
    copies: list[int]
    """Rows to each node, a token counted once an expert."""
    error: float
    """Largest difference of outputs and gradients from the first arm's, in units of rounding."""


def measure(
    cases: list[Case],
    arms: list[dispatchers.Arm],
    rounds: int,
    nodes: int,
    gpu: bool,
    links: bool,
    meet: Any,
    profile: Path | None = None,
) -> tuple[float, list[Seen]]:
    """Run on one rank; returns the bytes a second it sends inside the node, and what it saw.

    `links`: nodes have links whose counters count. `meet` is a barrier of all ranks that uses none
    of them. `profile`: where rank 0's traces go, one an arm and case. Raises EfaError if two arms
    disagree.
    """
    torch.set_num_threads(1)
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    pg = dispatchers.groups()
    rate = near_rate(nodes, meet, gpu)
    seen = []
    for case in cases:
        runner = Runner(case, arms, nodes, gpu, links, meet, pg)
        seen.append(runner.run(rounds))
        if profile is not None:
            for turns, dispatcher in runner.arms:
                turns.busy = runner.observe(turns.arm, dispatcher, profile)
        if dist.get_rank() == 0:
            print(f"{case.layer.name}, {case.kind}: measured {rounds} rounds", flush=True)
    dist.destroy_process_group()
    return rate, seen


def near_rate(nodes: int, meet: Any, gpu: bool, size: int = 16 << 20) -> float:
    """Bytes a second that this rank sends to its node's others while all do; inf if it is alone."""
    world, rank = dist.get_world_size(), dist.get_rank()
    per_node = world // nodes
    mine = range(rank // per_node * per_node, (rank // per_node + 1) * per_node)
    group = dist.new_group(list(mine), use_local_synchronization=True)
    if per_node == 1:
        return float("inf")
    device = "cuda" if gpu else "cpu"
    sent = torch.zeros(size // per_node * per_node, dtype=torch.uint8, device=device)
    received, best = torch.empty_like(sent), 0.0
    for _ in range(3):
        meet.wait()
        start = time.perf_counter()
        dist.all_to_all_single(received, sent, group=group)
        _settle(gpu)
        away = sent.numel() * (per_node - 1) / per_node
        best = max(best, away / (time.perf_counter() - start))
    return best


class Runner:
    """One case on one rank: its inputs, its dispatchers, and the turns they take."""

    def __init__(
        self,
        case: Case,
        arms: list[dispatchers.Arm],
        nodes: int,
        gpu: bool,
        links: bool,
        meet: Any,
        pg: Any,
    ) -> None:
        self.gpu, self.meet, self.name = gpu, meet, f"{case.layer.name} {case.kind}"
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.counts = links and self.rank % (self.world // nodes) == 0
        layer, dtype = case.layer, DTYPES[case.dtype]
        device = torch.device("cuda" if gpu else "cpu")
        random = torch.Generator().manual_seed(1234 + self.rank)
        if case.recorded is None:
            chosen = routing.choose(case.kind, layer, case.tokens, nodes, random)
        else:
            chosen = case.recorded.of_rank(self.rank, case.tokens)
        self.rows, self.copies = bounds.rows_to_nodes(chosen, layer.experts, nodes)
        self.map = torch.zeros(case.tokens, layer.experts, dtype=torch.bool)
        self.map = self.map.scatter_(1, chosen, True).to(device)
        weights = torch.rand(case.tokens, layer.experts, generator=random).to(device) + 0.5
        weights = weights * self.map
        self.probs = (weights / weights.sum(dim=1, keepdim=True)).requires_grad_()
        shape = (case.tokens, 1, case.hidden)
        self.hidden = torch.randn(shape, generator=random).to(device, dtype).requires_grad_()
        self.grad = torch.randn(shape, generator=random).to(device, dtype)
        # Experts that differ, or rows that went to a wrong one would not be noticed.
        local = layer.experts // self.world
        first = self.rank * local
        self.scale = 0.5 + torch.arange(first, first + local, device=device) / layer.experts
        self.scale = self.scale.requires_grad_()
        self.arms = [
            (Turns(arm), dispatchers.build(arm, layer.experts, layer.topk, case.hidden, dtype, pg))
            for arm in arms
        ]
        self.eps = torch.finfo(dtype).eps

    def run(self, rounds: int) -> Seen:
        """Check the arms against each other, then let them take turns."""
        error = self.check()
        for round_ in range(rounds):
            shift = round_ % len(self.arms)  # so that none is always the first
            for turns, dispatcher in self.arms[shift:] + self.arms[:shift]:
                self.turn(turns, dispatcher)
        return Seen([turns for turns, _ in self.arms], self.rows, self.copies, error)

    def turn(self, turns: Turns, dispatcher: Any) -> None:
        """One forward and backward between two readings of the node's counters."""
        self.meet.wait()
        before = self._link_bytes()
        meter = Meter()
        with meter.watching():
            self.meet.wait()
            mark = asleep()
            turns.starts.append(time.monotonic())
            output = self.forward(dispatcher)
            _settle(self.gpu)
            turns.middles.append(time.monotonic())
            output.backward(self.grad)
            _settle(self.gpu)
            turns.ends.append(time.monotonic())
            slept = None if mark is None or self.gpu else asleep(mark)
            self.meet.wait()
        after = self._link_bytes()
        if before is not None:
            turns.sent.append(after - before)
        if slept is not None:
            turns.slept.append(slept)
        turns.messages, turns.payload = meter.messages, meter.payload

    def observe(self, arm: dispatchers.Arm, dispatcher: Any, folder: Path) -> overlap.Busy:
        """One forward and backward, recorded; on GPUs rank 0's streams as a trace in `folder`."""
        self.meet.wait()
        name = f"{arm} {self.name}".replace(", ", "-").replace(" ", "-")
        trace = folder / f"{name}.json" if self.gpu and self.rank == 0 else None
        with overlap.recorded(trace) as busy:
            self.forward(dispatcher).backward(self.grad)
        return busy

    def forward(self, dispatcher: Any) -> torch.Tensor:
        """Dispatch, experts that cost one pass over their rows, combine: [T, 1, H]."""
        self.hidden.grad = self.probs.grad = self.scale.grad = None
        rows, probs = dispatcher.dispatch_preprocess(self.hidden, self.map, self.probs)
        rows, probs = dispatcher.token_dispatch(rows, probs)
        rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
        factor = self.scale.repeat_interleave(counts.to(self.scale.device)) * probs  # [R]
        rows = rows * factor.to(rows.dtype).unsqueeze(1)
        rows = dispatcher.combine_preprocess(rows)
        return dispatcher.combine_postprocess(dispatcher.token_combine(rows))

    def check(self) -> float:
        """Largest disagreement with the first arm; EfaError if rounding cannot explain it.

        In units of the type's rounding error at the largest value of each tensor: sums of k rows,
        in another order or precision, differ by a few of them.
        """
        reference, worst = None, 0.0
        for turns, dispatcher in self.arms:
            output = self.forward(dispatcher)
            output.backward(self.grad)
            made = {
                "outputs": output.detach(),
                "token gradients": _or_zeros(self.hidden),
                "probability gradients": _or_zeros(self.probs) * self.map,
                "expert gradients": _or_zeros(self.scale),
            }
            made = {name: tensor.float() for name, tensor in made.items()}
            reference = made if reference is None else reference
            for name, tensor in made.items():
                unit = self.eps * reference[name].abs().max().clamp(min=1e-30)
                error = float((tensor - reference[name]).abs().max() / unit)
                worst = max(worst, error)
                if not error < 8:
                    raise EfaError(
                        f"{name} of {turns.arm} differ from those of {self.arms[0][0].arm} by "
                        f"{error:.0f} roundings on rank {self.rank}: one of the two is wrong"
                    )
        return worst

    def _link_bytes(self) -> int | None:
        """Bytes that have left this node, on its first rank; None elsewhere and without links."""
        return network.counters(os.getpid()).sent_bytes if self.counts else None


def _settle(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()


def _or_zeros(leaf: torch.Tensor) -> torch.Tensor:
    """The gradient of a leaf, zeros where none has come to it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
