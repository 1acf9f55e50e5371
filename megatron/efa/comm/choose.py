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


@dataclass(frozen=True)
class Costs:
    """What the model takes for what the cluster does not tell, and for the host."""

    near: Link
    far: Link
    stage: float
    """Seconds by which starting a stage delays it."""


ON_GPUS = Costs(Link(peak=400e9, latency=5e-6), Link(peak=50e9, latency=20e-6), 10e-6)
"""A GPU of p5 to p6-b200: EFA 400 Gbit/s; NVLink 900 GB/s both ways, of which NCCL gets 400."""

ON_CPUS = Costs(Link(peak=200e6, latency=200e-6), Link(peak=31e6, latency=200e-6), 2e-3)
"""Four gloo ranks on an emulated node with a 1 Gbit/s link, on two cores; measured, and rough."""


@dataclass(frozen=True)
class Plan:
    two_level: bool
    pieces: int


FLAT = Plan(False, 1)


def plan(two: TwoLevel, size: int, passes: int, mode: Mode = "auto", gpu: bool = False) -> Plan:
    """Plan a collective of `size` bytes: the whole message, R chunks of it for a scatter or gather.

    `passes` is 2 for an all-reduce, 1 for one half of it.
    """
    if mode == "off" or not two.spans_nodes:
        return FLAT
    costs, cluster = ON_GPUS if gpu else ON_CPUS, current()
    costs = Costs(cluster.near or costs.near, cluster.far or costs.far, costs.stage)
    pieces = _pieces(two, size, costs)
    if mode == "auto":
        ours = two_level_seconds(two, size, passes, pieces, costs)
        if ours > MARGIN * flat_seconds(two, size, passes, costs):
            return FLAT
    return Plan(True, pieces)


def _pieces(two: TwoLevel, size: int, costs: Costs) -> int:
    """As many as still send rail messages that reach `SHARE` of the far link's peak."""
    link = Link(costs.far.peak, costs.far.latency + costs.stage)
    return max(1, min(MOST_PIECES, int(size / two.per_node / link.size_at(SHARE))))


def flat_seconds(two: TwoLevel, size: int, passes: int, costs: Costs) -> float:
    """Modelled time of a ring over the flat group."""
    near, far, ranks = costs.near, costs.far, two.nodes * two.per_node
    crossing = size * (ranks - 1) / ranks
    latency = two.nodes * far.latency + (ranks - two.nodes) * near.latency
    return passes * (latency + max(crossing / two.per_node / far.peak, crossing / near.peak))


def two_level_seconds(two: TwoLevel, size: int, passes: int, pieces: int, costs: Costs) -> float:
    """Modelled time of both levels: the longer of the two, plus what cutting leaves uncovered."""
    near, far = costs.near, costs.far
    in_node = size * (two.per_node - 1) / two.per_node / near.peak
    on_rail = size / two.per_node * (two.nodes - 1) / two.nodes / far.peak
    latency = (two.per_node - 1) * near.latency + (two.nodes - 1) * far.latency
    covered = max(in_node, on_rail) + min(in_node, on_rail) / pieces
    return passes * (2 * costs.stage + latency + covered)


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
