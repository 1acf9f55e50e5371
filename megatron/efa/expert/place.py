"""Where a rank stands in its expert-parallel group: its node and its rail."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.efa.groups import TwoLevel, two_level

PURPOSE = "expert"


@dataclass(frozen=True)
class Place:
    """N nodes of P ranks; rank (n, p) is number n * P + p of the group and has its own experts."""

    nodes: int
    per_node: int
    node: int
    index: int
    two: TwoLevel | None
    """What its transfers are run for; None if the group is this rank alone."""
    intra: Any | None
    """The ranks of this node, None if P = 1."""
    rail: Any | None
    """The ranks with this one's index in their nodes, None if N = 1."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.node * self.per_node + self.index


def place_of(group: Any) -> Place:
    """Place this rank in `group`; one that lies unevenly on its nodes counts as one node."""
    if group is None or group.size() == 1:
        return Place(1, 1, 0, 0, None, None, None)
    two = two_level(group, PURPOSE)
    if not two.even:
        index = dist.get_group_rank(group, dist.get_rank())
        return Place(1, group.size(), 0, index, two, group, None)
    return Place(
        two.nodes,
        two.per_node,
        two.node,
        two.index,
        two,
        two.intra if two.per_node > 1 else None,
        two.rail if two.nodes > 1 else None,
    )
