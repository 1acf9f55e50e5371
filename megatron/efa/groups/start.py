"""What the patched `megatron.core.parallel_state` calls: groups made, groups ready, groups gone.

With `--efa-groups` each rank makes the groups that it is a member of, and no other, and connects
those that a training step uses before the first step. No order of waiting can close a circle: all
ranks walk through one and the same sequence of groups (upstream's loops), each leaves out those
that it is not in, and connecting and splitting go through the sequence again in the same order.
"""

import time
from argparse import Namespace
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa.cluster.current import current
from megatron.efa.groups import options, parts
from megatron.efa.groups.axes import KEYS, axis_of, is_gloo_twin
from megatron.efa.groups.create import failure, new_group

# fmt: off
HOT = frozenset((
    "tp", "cp", "tp_cp", "pp", "mp", "embd", "dp_cp", "intra_dp_cp", "tp_dp_cp", "ep", "ep_tp",
    "tp_ep_mp", "tp_ep_pp", "ep_dp", "intra_ep_dp", "inter_ep_dp", "intra_dist_opt_instance",
))
# fmt: on
"""Axes that every training step with them communicates on; the others connect when first used."""

EXCHANGING = frozenset(("ep", "tp_ep_mp"))
"""Axes of all-to-alls: for them NCCL connects pairs, for the rest rings, each at first use."""

_on = False
_expected: set[tuple[str, str]] = set()
_groups: list[Any] = []
_seconds = 0.0


def configure(args: Namespace) -> None:
    """Do from now on as Megatron's `args` say. Raises EfaError for a communicator config that
    names what does not exist."""
    global _on
    _on = bool(getattr(args, "efa_groups", False))
    path = getattr(args, "nccl_communicator_config_path", None)
    if _on and path is not None:
        options.check(path, sorted(purpose for _, purpose in _expected))


def expect(axis: str, purpose: str) -> None:
    """Have `two_level(group of axis, purpose)` made and connected at start, with `--efa-groups`.

    For a path to call when its own switch is read: on all ranks, before the groups are made.
    Raises ValueError if upstream has no such axis.
    """
    if axis not in KEYS.values():
        raise ValueError(f"no axis {axis!r} among {sorted(set(KEYS.values()))}")
    _expected.add((axis, purpose))


def unexpect() -> None:
    """Forget what `expect` was told."""
    _expected.clear()


def makes(kwargs: Mapping[str, Any]) -> bool:
    """Whether `make` takes this call of upstream's `create_group`."""
    return _on and kwargs["ranks"] is not None and kwargs["backend"] not in ("mpi", "ucc")


def make(kwargs: Mapping[str, Any]) -> Any:
    """Return the group that upstream asks `torch.distributed.new_group(**kwargs)` for.

    A rank outside it returns at once, with torch's mark of a non-member.
    """
    global _seconds
    if dist.get_rank() not in kwargs["ranks"]:
        return dist.GroupMember.NON_GROUP_MEMBER
    start = time.perf_counter()
    group = new_group(
        kwargs["ranks"],
        kwargs.get("group_desc") or "undefined",
        kwargs.get("timeout"),
        kwargs["backend"],
        kwargs["pg_options"],
    )
    parts.follow_timeouts(group)
    _groups.append(group)
    _seconds += time.perf_counter() - start
    return group


def ready(configs: Mapping[str, Mapping[str, Any]], timeout: timedelta) -> None:
    """Split and connect what a step will use, now that upstream has made its groups.

    `configs` are the options of the communicator config, `timeout` what upstream's groups got.
    """
    options.remember(configs)
    parts.remember_timeout(timeout)
    if not _on:
        return
    start = time.perf_counter()
    hot = [g for g in _groups if axis_of(g) in HOT and g.size() > 1 and not is_gloo_twin(g)]
    for group in hot:
        connect(group)
    made = [part for group in _groups if not is_gloo_twin(group) for part in _split(group)]
    if dist.get_rank() == 0:
        cluster = current()
        print(
            f"> made {len(_groups)} groups of rank 0 in {_seconds:.2f} s, connected {len(hot)} of "
            f"them and {len(made)} parts of nodes and rails in {time.perf_counter() - start:.2f} s "
            f"({len(cluster.nodes)} nodes, from {cluster.source or 'a description'})",
            flush=True,
        )


def _split(group: Any) -> list[Any]:
    """Make and connect the parts of `group` that are expected; return those that are new."""
    axis, new = axis_of(group), []
    for purpose in sorted(purpose for wanted, purpose in _expected if wanted == axis):
        two = parts.two_level(group, purpose)
        for part in (two.intra, two.rail):
            if part is not None and part is not group and part.size() > 1:
                connect(part)
                new.append(part)
    return new


def connect(group: Any) -> None:
    """Have NCCL build the communicator of `group` now; other backends built theirs when it was
    made. Every member must call it. Raises EfaError if a member cannot be reached."""
    if dist.get_backend(group) != "nccl":
        return
    ones = torch.ones(group.size(), device=torch.device("cuda", torch.cuda.current_device()))
    try:
        dist.all_reduce(ones, group=group)
        if axis_of(group) in EXCHANGING:
            dist.all_to_all_single(torch.empty_like(ones), ones, group=group)
        torch.cuda.synchronize()
    except Exception as error:
        ranks = dist.get_process_group_ranks(group)
        raise failure(error, "connect", ranks, group.group_desc) from error


def forget() -> None:
    """Forget upstream's groups and our parts (`destroy_model_parallel` calls it)."""
    global _seconds
    parts.forget()
    options.remember({})
    _groups.clear()
    _seconds = 0.0
