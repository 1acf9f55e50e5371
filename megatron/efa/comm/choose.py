"""Whether a collective goes two-level, and into how many pieces it is cut.

Decided from what all ranks of a group know alike: the message's size, the group's shape and the
cluster's links. Times are those of the alpha-beta model (`Link`), for a ring in a flat group and
for each stage of the two levels; a ring's chain of N nodes with P members each passes N far links
and R - N near ones, R = N P, and (R-1)/R of the message leaves every node, over P members' links.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.efa.cluster.current import current
from megatron.efa.cluster.model import Link
from megatron.efa.groups import TwoLevel

Mode = Literal["off", "auto", "on"]
"""`off`: the flat group. `on`: two levels wherever a group has them. `auto`: what is faster."""

MARGIN = 0.9
"""Two levels must promise at most this share of the flat time: the model has no contention."""

MOST_PIECES = 8
SHARE = 0.8
"""Of a link's peak rate: what a message on the rail should reach."""


Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]


@dataclass(frozen=True)
class Costs:
    near: Link
    far: Link
    gpu: bool

    @property
    def stage(self) -> float:
        """Seconds by which starting a stage delays it: a kernel's launch, or a thread's turn."""
        return 10e-6 if self.gpu else 2e-3


def costs_of(per_node: int, gpu: bool) -> Costs:
    """The cluster's links, or what stands for those that are not known; `per_node` ranks a node.

    For GPUs that is p5 to p6-b200: EFA of 400 Gbit/s a GPU, NVLink of 900 GB/s both ways, of which
    NCCL gets some 400. For CPUs an emulated node: gloo within it on two cores, and 1 Gbit/s that
    its ranks share.
    """
    cluster = current()
    near = Link(400e9, 5e-6) if gpu else Link(200e6, 200e-6)
    far = Link(50e9, 20e-6) if gpu else Link(125e6 / per_node, 200e-6)
    return Costs(cluster.near or near, cluster.far or far, gpu)


@dataclass(frozen=True)
class Plan:
    two_level: bool
    pieces: int


FLAT = Plan(False, 1)


def plan(two: TwoLevel, size: int, kind: Kind, mode: Mode = "auto", gpu: bool = False) -> Plan:
    """Plan a collective of a whole message (R parts, for a scatter or gather) of `size` bytes."""
    if mode == "off" or not two.spans_nodes:
        return FLAT
    costs = costs_of(two.per_node, gpu)
    cuts = pieces(size // two.per_node, costs)
    if mode == "auto":
        ours = two_level_seconds(two, size, kind, cuts, costs)
        if ours > MARGIN * flat_seconds(two, size, kind, costs):
            return FLAT
    return Plan(True, cuts)


def pieces(size: int, costs: Costs) -> int:
    """Into how many to cut a rail's `size` bytes: each still reaches `SHARE` of its peak rate."""
    link = Link(costs.far.peak, costs.far.latency + costs.stage)
    return max(1, min(MOST_PIECES, int(size / link.size_at(SHARE))))


def flat_seconds(two: TwoLevel, size: int, kind: Kind, costs: Costs) -> float:
    """Modelled time of a ring over the flat group. gloo's reduce-scatter is an all-reduce."""
    twice = kind == "all_reduce" or (kind == "reduce_scatter" and not costs.gpu)
    passes = 2 if twice else 1
    near, far, ranks = costs.near, costs.far, two.nodes * two.per_node
    crossing = size * (ranks - 1) / ranks
    latency = two.nodes * far.latency + (ranks - two.nodes) * near.latency
    return passes * (latency + max(crossing / two.per_node / far.peak, crossing / near.peak))


def two_level_seconds(two: TwoLevel, size: int, kind: Kind, pieces: int, costs: Costs) -> float:
    """Modelled time of both levels: the longer of the two, plus what cutting leaves uncovered.

    On CPUs their sum: copying in the node takes the cores that the rail needs.
    """
    passes = 2 if kind == "all_reduce" else 1
    near, far = costs.near, costs.far
    in_node = size * (two.per_node - 1) / two.per_node / near.peak
    on_rail = size / two.per_node * (two.nodes - 1) / two.nodes / far.peak
    latency = (two.per_node - 1) * near.latency + (two.nodes - 1) * far.latency
    uncovered = min(in_node, on_rail) / (pieces if costs.gpu else 1)
    return passes * (2 * costs.stage + latency + max(in_node, on_rail) + uncovered)


def bucket_bytes(two: TwoLevel, far: Link) -> int:
    """Bytes of a gradient bucket whose reduction reaches `SHARE` of the rail's peak rate.

    A ring of N nodes sends N-1 messages of 1/N of the rail's share, S/P: each must be
    `far.size_at(SHARE)` bytes for S.
    """
    return int(two.nodes * two.per_node * far.size_at(SHARE))


def cut(count: int, pieces: int, unit: int = 1) -> list[slice]:
    """Cut `count` elements into at most `pieces` ranges, multiples of `unit` but for the last."""
    step = max(unit, -(-count // pieces // unit) * unit)
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]
