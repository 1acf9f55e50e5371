"""Process groups between neighbouring stages: one for each pair of them and each direction.

A send on one of them waits for no other message, while upstream's share one communicator (two with
two stages): there a gradient can queue behind an activation that the peer does not yet receive.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa.cluster.current import current
from megatron.efa.groups import subgroup
from megatron.efa.pipeline.wire import Wire

PURPOSES = {"send_next": "forward", "recv_prev": "forward"}
PURPOSES |= {"send_prev": "backward", "recv_next": "backward"}


@dataclass(frozen=True)
class Wires:
    """This rank's wires, by upstream's names for what runs on them."""

    by_name: dict[str, Wire]

    def of(self, name: str) -> Wire:
        """The wire of `send_next`, `recv_prev`, `send_prev` or `recv_next`."""
        return self.by_name[name]


_made: weakref.WeakKeyDictionary[Any, Wires] = weakref.WeakKeyDictionary()
"""By pipeline group: the schedules make a communicator every step."""


def wires_of(pp_group: Any, config: Any) -> Wires | None:
    """Return the wires of this rank in `pp_group`, which all its members must ask for.

    None where upstream's own code is to run: another pipeline than the job's (of a model of several
    modules), a single stage, and `use_ring_exchange_p2p`.
    """
    from megatron.core import parallel_state

    if pp_group.size() == 1 or config.use_ring_exchange_p2p:
        return None
    ranks = dist.get_process_group_ranks(pp_group)
    if not parallel_state.model_parallel_is_initialized() or ranks != (
        dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    ):
        return None
    if pp_group not in _made:
        around = config.virtual_pipeline_model_parallel_size is not None
        copies = None
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            copies = parallel_state.get_tensor_model_parallel_group()
        _made[pp_group] = _make(pp_group, ranks, around, copies)
    return _made[pp_group]


def hops(stages: int, around: bool) -> list[tuple[int, int, str]]:
    """Sender, receiver and purpose of every wire of a pipeline, in the order of making them.

    All stages walk through this one list and make what is theirs, so no circle of them can wait for
    one another. Wires of even stages come first: those do not wait for one another at all. `around`
    asks for those between the last and the first stage, which only virtual stages need.
    """
    pairs = [(i, i + 1) for first in (0, 1) for i in range(first, stages - 1, 2)]
    pairs += [(stages - 1, 0)] if around else []
    forward = [(a, b, "forward") for a, b in pairs]
    return forward + [(b, a, "backward") for a, b in pairs]


def _make(pp_group: Any, ranks: list[int], around: bool, copies: Any) -> Wires:
    me, by_name, sliced = dist.get_rank(), {}, False
    for source, target, purpose in hops(len(ranks), around):
        ends = (ranks[source], ranks[target])
        if me in ends:
            sends = me == ends[0]
            name = "send_" if sends else "recv_"
            name += "next" if sends == (purpose == "forward") else "prev"
            peer = ends[1] if sends else ends[0]
            # The direction is part of the name: with two stages two wires have the same ends.
            group = subgroup(pp_group, ends, f"{purpose}_{ends[0]}_{ends[1]}")
            connect(group, peer, sends)
            shared = copies if copies is not None and crosses(copies, peer - me) else None
            by_name[name] = Wire(group, peer, shared)
            sliced |= shared is not None
    if me == 0:
        slices = f", {copies.size()} slices of each message between nodes" if sliced else ""
        print(f"> pipeline of {len(ranks)} stages over {len(by_name)} wires a rank{slices}")
    return Wires(by_name)


def crosses(copies: Any, shift: int) -> bool:
    """Whether the ranks of `copies` lie in one node, and those `shift` on in another one.

    The tensor-parallel group of the neighbouring stage is this one's, shifted: upstream numbers
    ranks by mixed radix, whatever its order of the axes.
    """
    cluster, ranks = current(), dist.get_process_group_ranks(copies)
    here = {cluster.domain_of(rank) for rank in ranks}
    there = {cluster.domain_of(rank + shift) for rank in ranks}
    return len(here) == len(there) == 1 and here != there


def connect(group: Any, peer: int, sends: bool) -> None:
    """Have NCCL connect the two ends now: at first use each would wait for the other, in an order
    that the schedule, not `hops`, gives. gloo has connected when the group was made."""
    if dist.get_backend(group) == "nccl":
        token = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
        (dist.isend if sends else dist.irecv)(token, peer, group=group).wait()
        torch.cuda.synchronize()
