"""Two-level process groups: the part of any Megatron group in a node, and the part along a rail.

A group of ranks spans nodes (or NVLink domains, where those are wider). Its intra part holds the
members of one node, its rail part the members with one index in their nodes:

    group 0..7 on 2 nodes of 4    intra {0 1 2 3} {4 5 6 7}    rail {0 4} {1 5} {2 6} {3 7}

so traffic between nodes runs rail by rail, and rank r of the group is index r % per_node of node
r // per_node. Where nodes hold unequal shares of the group there are no rails: `even` is False and
the caller keeps to the flat group.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.efa.cluster.current import current


@dataclass(frozen=True)
class Shape:
    """How a group lies on nodes."""

    blocks: tuple[tuple[int, ...], ...]
    """Global ranks by node, both in rank order."""
    even: bool
    """Every node holds as many members, next to one another in the group's order."""

    @property
    def nodes(self) -> int:
        return len(self.blocks)

    @property
    def per_node(self) -> int:
        """Members on each node, if `even`."""
        return len(self.blocks[0])

    def rails(self) -> list[tuple[int, ...]]:
        """The ranks of each rail, if `even`."""
        return list(zip(*self.blocks, strict=True))


def shape_of(ranks: Sequence[int], domain_of: Callable[[int], Hashable]) -> Shape:
    """Split `ranks` (ascending, as torch keeps them) by the domain that holds each."""
    blocks: dict[Hashable, list[int]] = {}
    for rank in ranks:
        blocks.setdefault(domain_of(rank), []).append(rank)
    equal = len({len(block) for block in blocks.values()}) == 1
    adjacent = [rank for block in blocks.values() for rank in block] == list(ranks)
    return Shape(tuple(tuple(block) for block in blocks.values()), equal and adjacent)


@dataclass(frozen=True)
class TwoLevel:
    """A group with its parts for this rank."""

    flat: Any
    """The group itself (a torch ProcessGroup)."""
    shape: Shape
    node: int
    """Index of this rank's node in `shape.blocks`."""
    index: int
    """Index of this rank in its node."""
    intra: Any | None
    """Group of this node's members; None if uneven. The flat group if it lies in one node."""
    rail: Any | None
    """Group of this index's members; None if uneven. The flat group if nodes hold one each."""

    @property
    def even(self) -> bool:
        return self.shape.even

    @property
    def nodes(self) -> int:
        return self.shape.nodes

    @property
    def per_node(self) -> int:
        return self.shape.per_node

    @property
    def spans_nodes(self) -> bool:
        """Whether there is anything to gain from two levels: several nodes, several ranks each."""
        return self.even and self.nodes > 1 and self.per_node > 1


_made: dict[tuple[tuple[int, ...], str], TwoLevel] = {}


def two_level(group: Any, purpose: str = "") -> TwoLevel:
    """Return `group` (None for the world) split by node; made once, then cached by its members.

    Every member must call it in the same order relative to its other groups, none other need.
    Parts of different `purpose`s have communicators of their own, so that they can be in flight
    together; the purpose also names them for the flight recorder.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    key = (ranks, purpose)
    if key not in _made:
        _made[key] = _make(group, ranks, purpose)
    return _made[key]


def forget() -> None:
    """Drop the cached groups (`destroy_model_parallel` calls it)."""
    _made.clear()


def _make(group: Any, ranks: tuple[int, ...], purpose: str) -> TwoLevel:
    shape = shape_of(ranks, current().domain_of)
    rank = dist.get_rank()
    node = next(i for i, block in enumerate(shape.blocks) if rank in block)
    index = shape.blocks[node].index(rank)
    intra = rail = None
    if shape.even:
        intra = _part(group, ranks, shape.blocks[node], f"{purpose}_intra")
        rail = _part(group, ranks, shape.rails()[index], f"{purpose}_rail")
    return TwoLevel(group, shape, node, index, intra, rail)


def _part(group: Any, ranks: tuple[int, ...], part: tuple[int, ...], name: str) -> Any:
    if part == ranks:
        return group
    return dist.new_group(list(part), use_local_synchronization=True, group_desc=f"efa_{name}")
