"""Process groups made by their members alone, under names that all members agree on.

torch's `use_local_synchronization` leaves the other ranks out, but names the group after a counter
that then differs between ranks with unequal numbers of groups (the embedding group has members on
the first and last stage only), and the members wait for one another under different names. Ours is
made of the ranks, the description, and how many groups of both there were.
"""

import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.efa.errors import EfaError
from megatron.efa.groups.shape import spelled

_made: Counter[str] = Counter()
_made_in: Any = None
"""Weak reference to the default group that `_made` counts under: a new one starts a new store."""
_naming = threading.Lock()


def new_group(
    ranks: Sequence[int],
    description: str,
    timeout: timedelta | None = None,
    backend: str | None = None,
    options: Any = None,
) -> Any:
    """Return a new torch ProcessGroup of `ranks`, of which this rank must be one.

    Blocks (gloo) or will block at first use (NCCL) until all members have called it, so two
    members must make the groups that they share in the same order. `timeout`, `backend` and
    `options` as in `torch.distributed.new_group`. Raises EfaError if torch cannot make it.
    """
    with _named(_name(ranks, description)):
        try:
            return dist.new_group(
                list(ranks),
                timeout=timeout,
                backend=backend,
                pg_options=options,
                use_local_synchronization=True,
                group_desc=description,
            )
        except Exception as error:
            raise failure(error, "make", ranks, description) from error


def failure(error: Exception, verb: str, ranks: Sequence[int], description: str) -> EfaError:
    """The sentence for what torch raised when this rank tried to `verb` a group."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return EfaError(
        f"rank {dist.get_rank()} cannot {verb} group {description} of ranks {spelled(ranks)}: "
        f"{first[:300]}; see whether a rank of these has ended, and whether its node is reachable"
    )


def _name(ranks: Sequence[int], description: str) -> str:
    global _made_in
    world = distributed_c10d._get_default_group()
    if _made_in is None or _made_in() is not world:
        _made.clear()
        _made_in = weakref.ref(world)
    digest = hashlib.sha1(
        f"{description} {sorted(ranks)}".encode(), usedforsecurity=False
    ).hexdigest()
    _made[digest] += 1
    return f"efa_{digest}_{_made[digest]}"


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Have torch call the next group `name`, and not split it off the default group.

    Splitting (done where the default group is bound to a device) is collective over all ranks.
    """
    theirs = getattr(distributed_c10d, "_process_group_name", None)
    if theirs is None:
        raise EfaError(
            "this PyTorch names process groups in a way that is not known here: install a release "
            "named in pyproject.toml, or leave --efa-groups out"
        )
    world = distributed_c10d._get_default_group()
    with _naming:
        bound, distributed_c10d._process_group_name = world.bound_device_id, lambda *_, **__: name
        if bound is not None:
            world.bound_device_id = None
        try:
            yield
        finally:
            distributed_c10d._process_group_name = theirs
            if bound is not None:
                world.bound_device_id = bound
