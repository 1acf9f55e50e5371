"""The parts of a group for this rank: its members on this node, and those on this rank's rail."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from megatron.efa.cluster.current import current
from megatron.efa.errors import EfaError
from megatron.efa.groups import options
from megatron.efa.groups.axes import axis_of, part_description
from megatron.efa.groups.create import new_group
from megatron.efa.groups.shape import Shape, shape_of, spelled

_log = logging.getLogger(__name__)


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


By = Literal["domain", "node"]
_made: dict[tuple[tuple[int, ...], str, By], TwoLevel] = {}
_others: list[Any] = []
_warned: set[tuple[int, ...]] = set()
_timeout: timedelta | None = None


def two_level(group: Any, purpose: str = "", by: By = "domain") -> TwoLevel:
    """Return `group` (None for the world) split by node; made once, then cached by its members.

    A node is an NVLink domain here, which may hold several hosts; with `by="node"` it is a host:
    `two_level(parts.intra, purpose, by="node")` is the third tier, hosts within the domain.

    Every member must call it in the same order relative to its other groups, none other need.
    Parts of different `purpose`s have communicators of their own, so that they can be in flight
    together; the purpose also names them for the flight recorder. Raises EfaError if torch cannot
    make them, or the cluster described has not as many ranks as the job.
    """
    group = dist.group.WORLD if group is None else group
    ranks = tuple(dist.get_process_group_ranks(group))
    key = (ranks, purpose, by)
    if key not in _made:
        _made[key] = _make(group, ranks, purpose, by)
    made = _made[key]
    if made.flat is group:
        return made
    # Another group of the same members: only what stood for the group itself differs.
    own = {name: group for name in ("intra", "rail") if getattr(made, name) is made.flat}
    return replace(made, flat=group, **own)


def remember_timeout(timeout: timedelta | None) -> None:
    """Give the parts that are made from now on the `timeout` that upstream's groups have."""
    global _timeout
    _timeout = timeout


def forget() -> None:
    """Drop the cached groups; those over gloo are closed, as upstream closes its own."""
    global _timeout
    world = dist.distributed_c10d._world.pg_map
    parts = {p for made in _made.values() for p in {made.intra, made.rail} - {made.flat, None}}
    for part in (*parts, *_others):
        if part in world and dist.get_backend(part) == "gloo":
            dist.destroy_process_group(part)
    _made.clear()
    _others.clear()
    _warned.clear()
    _timeout = None


def subgroup(group: Any, ranks: Sequence[int], purpose: str) -> Any:
    """Return a new group of `ranks`, some of `group`'s, with its backend, options and timeout.

    For what is neither in a node nor a rail. All of `ranks`, and none other, must call it, in the
    same order relative to their other groups; `destroy_model_parallel` ends it.
    """
    made = _part(group, (), tuple(ranks), (axis_of(group), purpose, ""))
    _others.append(made)
    return made


def _make(group: Any, ranks: tuple[int, ...], purpose: str, by: By) -> TwoLevel:
    cluster = current()
    if cluster.world_size != dist.get_world_size():
        raise EfaError(
            f"the cluster (from {cluster.source or 'its description'}) holds {cluster.world_size} "
            f"ranks and this job has {dist.get_world_size()}: describe the nodes that it runs on"
        )
    shape = shape_of(ranks, cluster.domain_of if by == "domain" else cluster.node_of)
    rank = dist.get_rank()
    node = next(i for i, block in enumerate(shape.blocks) if rank in block)
    index = shape.blocks[node].index(rank)
    intra = rail = None
    if shape.even:
        axis = axis_of(group)
        intra = _part(group, ranks, shape.blocks[node], (axis, purpose, "intra"))
        rail = _part(group, ranks, shape.rails()[index], (axis, purpose, "rail"))
    elif rank == ranks[0] and ranks not in _warned:
        _warned.add(ranks)
        held = " + ".join(str(len(block)) for block in shape.blocks[:8])
        more = " + ..." if shape.nodes > 8 else ""
        _log.warning(
            f"group {axis_of(group)} of ranks {spelled(ranks)} lies unevenly on its nodes "
            f"({held}{more}): its traffic is not split by node; choose a size of which every node "
            "holds as many ranks, next to one another"
        )
    return TwoLevel(group, shape, node, index, intra, rail)


def _part(
    group: Any, ranks: tuple[int, ...], part: tuple[int, ...], named: tuple[str, str, str]
) -> Any:
    if part == ranks:
        return group
    backend = dist.get_backend(group)
    asked = options.of_part(*named) if backend == "nccl" else None
    made = new_group(part, part_description(*named), _timeout, backend, asked)
    follow_timeouts(made)
    return made


def follow_timeouts(group: Any) -> None:
    """Let `group`'s timeout change with upstream's (--distributed-timeout-seconds-after-init)."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None:
        if state._global_process_group_list is None:
            state._global_process_group_list = [None]  # as upstream: the default group
        state._global_process_group_list.append(group)
