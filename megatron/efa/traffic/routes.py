"""What one rank sends in one collective, to ranks of its node and to others.

How a backend carries a collective is the backend's affair; here is what it comes to. gloo: a ring
in the order of ranks for gathers and reductions (its reduce-scatter is an all-reduce), a binomial
tree for a broadcast, and pairs for the rest. NCCL: rings that enter and leave each node once, by
each of its ranks in turn, so that a rank's share of what leaves is the node's over its ranks; what
NCCL does by trees or in the switch (NVLS) moves fewer bytes than are told here.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.efa.cluster.current import current
from megatron.efa.groups.axes import axis_of

AXES = {
    "dp_cp": "dp",
    "intra_dp_cp": "dp",
    "intra_dist_opt_instance": "dp",
    "tp_dp_cp": "dp",
    "ep_dp": "expert-dp",
    "intra_ep_dp": "expert-dp",
    "inter_ep_dp": "expert-dp",
    "tp_ep_mp": "ep",
    "ep_tp": "expert-tp",
    "hcp": "cp",
    "embd": "embedding",
    "pos_embd": "embedding",
}
"""Upstream's keys of groups -> the axis that their traffic is told under; others keep their key."""


Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


class Sent(NamedTuple):
    """Bytes and messages of one rank, by tier."""

    node_bytes: float = 0.0
    node_messages: float = 0.0
    fabric_bytes: float = 0.0
    fabric_messages: float = 0.0


@dataclass
class Members:
    """A process group as this rank sees it."""

    axis: str
    ranks: list[int]
    me: int
    """Index of this rank in `ranks`."""
    far: list[bool]
    """Of each member, whether it is outside this rank's NVLink domain."""
    domains: int
    native: bool
    """Whether its rings are NCCL's, which go by topology, and not gloo's, which go by rank."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    def ring(self, size: float, steps: int) -> Sent:
        """`steps` messages of `size` bytes to the next one in the ring."""
        if self.native:
            share = self.domains / self.size if self.domains > 1 else 0.0
        else:
            share = float(self.far[(self.me + 1) % self.size])
        near = 1 - share
        return Sent(near * size * steps, near * steps, share * size * steps, share * steps)

    def direct(self, sizes: Sequence[float]) -> Sent:
        """`sizes[i]` bytes to member i, in a message of its own where there are any."""
        node_bytes = node_messages = fabric_bytes = fabric_messages = 0.0
        for member, size in enumerate(sizes):
            if member == self.me or not size:
                continue
            if self.far[member]:
                fabric_bytes, fabric_messages = fabric_bytes + size, fabric_messages + 1
            else:
                node_bytes, node_messages = node_bytes + size, node_messages + 1
        return Sent(node_bytes, node_messages, fabric_bytes, fabric_messages)

    def to(self, member: int, size: float) -> Sent:
        return Sent(0, 0, size, 1) if self.far[member] else Sent(size, 1)

    def tree(self, root: int, size: float) -> Sent:
        """A broadcast of `size` bytes from member `root`."""
        if self.native:  # a chain: every member but the last sends it on
            one = self.ring(size, 1)
            return Sent(*(value * (self.size - 1) / self.size for value in one))
        place, sizes, reach = (self.me - root) % self.size, [0.0] * self.size, 1
        while reach < self.size:
            if place < reach and place + reach < self.size:
                sizes[(place + reach + root) % self.size] = size
            reach *= 2
        return self.direct(sizes)


_known: weakref.WeakKeyDictionary[Any, Members] = weakref.WeakKeyDictionary()


def members(group: Any) -> Members | None:
    """What is known of `group` (None: the world); None if this rank is not in it."""
    group = dist.group.WORLD if group is None else group
    if group not in _known:
        if group is None or dist.get_rank(group) < 0:
            return None
        cluster, ranks = current(), dist.get_process_group_ranks(group)
        domains = [cluster.domain_of(rank) for rank in ranks]
        me = dist.get_rank(group)
        axis, native = axis_of(group), "nccl" in dist.get_backend(group)
        if native:  # else its works do not know how long they took
            group._enable_collectives_timing()
        _known[group] = Members(
            AXES.get(axis, axis),
            ranks,
            me,
            [domain != domains[me] for domain in domains],
            len(set(domains)),
            native,
        )
    return _known[group]


class Described(NamedTuple):
    """A call: its group as given, a tensor of it, and what a member sends."""

    group: Any
    tensor: torch.Tensor | None
    sent: Callable[[Members], Sent]
    source: int | None = None
    """The member that a receive waits for."""
    by_global: bool = True
    """Whether `source` is a global rank."""


def _member(m: Members, rank: int | None, index: int | None) -> int:
    return index if rank is None else m.ranks.index(rank)


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _all_reduce(
    tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Described:
    return Described(group, tensor, lambda m: m.ring(tensor.nbytes / m.size, 2 * (m.size - 1)))


def _gather_into(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Described:
    return Described(
        group, input_tensor, lambda m: m.ring(output_tensor.nbytes / m.size, m.size - 1)
    )


def _all_gather(
    tensor_list: Tensors, tensor: Tensor, group: Any = None, async_op: bool = False
) -> Described:
    return Described(group, tensor, lambda m: m.ring(tensor.nbytes, m.size - 1))


def _scatter_sum(size: float) -> Callable[[Members], Sent]:
    return lambda m: m.ring(size / m.size, (1 if m.native else 2) * (m.size - 1))


def _reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> Described:
    return Described(group, input, _scatter_sum(input.nbytes))


def _reduce_scatter(
    output: Tensor, input_list: Tensors, op: Any = None, group: Any = None, async_op: bool = False
) -> Described:
    return Described(group, output, _scatter_sum(_size(input_list)))


def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Described:
    def sent(m: Members) -> Sent:
        if input_split_sizes is None or not len(input_split_sizes):
            return m.direct([input.nbytes / m.size] * m.size)
        row = input.nbytes / max(1, input.shape[0])
        return m.direct([row * int(count) for count in input_split_sizes])

    return Described(group, input, sent)


def _all_to_all(
    output_tensor_list: Tensors,
    input_tensor_list: Tensors,
    group: Any = None,
    async_op: bool = False,
) -> Described:
    return Described(
        group,
        input_tensor_list[0],
        lambda m: m.direct([tensor.nbytes for tensor in input_tensor_list]),
    )


def _broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Described:
    return Described(group, tensor, lambda m: m.tree(_member(m, src, group_src), tensor.nbytes))


def _reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Described:
    return Described(group, tensor, lambda m: m.ring(tensor.nbytes / m.size, m.size - 1))


def _gather(
    tensor: Tensor,
    gather_list: Tensors | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Described:
    def sent(m: Members) -> Sent:
        to = _member(m, dst, group_dst if dst is not None or group_dst is not None else 0)
        return Sent() if to == m.me else m.to(to, tensor.nbytes)

    return Described(group, tensor, sent)


def _scatter(
    tensor: Tensor,
    scatter_list: Tensors | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Described:
    def sent(m: Members) -> Sent:
        return m.direct([part.nbytes for part in scatter_list or ()])

    return Described(group, tensor, sent)


def _send(
    tensor: Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Described:
    return Described(group, tensor, lambda m: m.to(_member(m, dst, group_dst), tensor.nbytes))


def _receive(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Described:
    source = group_src if src is None else src
    return Described(group, tensor, lambda m: Sent(), source, by_global=src is not None)


def _barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None
) -> Described:
    return Described(group, None, lambda m: Sent())


CALLS: dict[str, Callable[..., Described]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _gather_into,
    "all_gather_single": _gather_into,
    "_all_gather_base": _gather_into,
    "all_gather": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "_reduce_scatter_base": _reduce_scatter_tensor,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send": _send,
    "isend": _send,
    "recv": _receive,
    "irecv": _receive,
    "barrier": _barrier,
}
"""torch.distributed's functions that move data, with parameters of the same names and order."""


def waits_far(described: Described, m: Members) -> bool:
    """Whether a receive, or else any of the group, is outside this rank's domain."""
    if described.source is None:
        return any(m.far)
    source = m.ranks.index(described.source) if described.by_global else described.source
    return m.far[source]
