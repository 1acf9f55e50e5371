"""How the ranks of a group lie on nodes: pure functions of ranks and domains."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


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
        """The ranks of each rail, if `even`. Raises ValueError if not."""
        return list(zip(*self.blocks, strict=True))


def shape_of(ranks: Sequence[int], domain_of: Callable[[int], Hashable]) -> Shape:
    """Split `ranks` (ascending, as torch keeps them) by the domain that holds each."""
    blocks: dict[Hashable, list[int]] = {}
    for rank in ranks:
        blocks.setdefault(domain_of(rank), []).append(rank)
    equal = len({len(block) for block in blocks.values()}) == 1
    adjacent = [rank for block in blocks.values() for rank in block] == list(ranks)
    return Shape(tuple(tuple(block) for block in blocks.values()), equal and adjacent)


def spelled(ranks: Sequence[int]) -> str:
    """`ranks` for people, short at any size: "0 8 16", "0-7", "0 8 16 .. 504 (64 ranks)"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 8:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[:3]))} .. {ranks[-1]} ({len(ranks)} ranks)"
