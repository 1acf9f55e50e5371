"""Two-level process groups: the part of any Megatron group in a node, and the part along a rail.

A group of ranks spans nodes (or NVLink domains, where those are wider). Its intra part holds the
members of one node, its rail part the members with one index in their nodes:

    group 0..7 on 2 nodes of 4    intra {0 1 2 3} {4 5 6 7}    rail {0 4} {1 5} {2 6} {3 7}

so traffic between nodes runs rail by rail, and rank r of the group is index r % per_node of node
r // per_node. Where nodes hold unequal shares of the group there are no rails: `even` is False and
the caller keeps to the flat group.
"""

from megatron.efa.groups.axes import axis_of, tier_of
from megatron.efa.groups.parts import TwoLevel, subgroup, two_level
from megatron.efa.groups.shape import Shape, shape_of
from megatron.efa.groups.start import configure, expect, forget

__all__ = [
    "Shape",
    "TwoLevel",
    "axis_of",
    "configure",
    "expect",
    "forget",
    "shape_of",
    "subgroup",
    "tier_of",
    "two_level",
]
