"""What one rank's collectives send to other nodes, and how long the rank waits for them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.core.tensor_parallel import mappings
from megatron.efa.cluster.current import current

_GATHERS = ("all_gather_into_tensor", "all_gather", "all_reduce", "reduce_scatter_tensor")


@dataclass
class Meter:
    """Counts while `watching`; a message is what one rank sends to one peer in one call."""

    messages: int = 0
    """To ranks of other nodes."""
    payload: int = 0
    """Bytes of those messages; of gathers and reductions, which choose their own routes, the
    bytes that a flat exchange would send."""
    _far: dict[Any, list[bool]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator["Meter"]:
        """Rebind the functions of torch.distributed to counting ones."""
        names = ("all_to_all_single", "isend", "send", *_GATHERS)
        # Where torch looks them up as well: its P2POp takes its own isend only.
        real = [(module, name) for module in (dist, dist.distributed_c10d) for name in names]
        # Upstream binds these when it is imported.
        real += [(mappings, name) for name in ("dist_all_gather_func", "dist_reduce_scatter_func")]
        real = [(module, name, getattr(module, name)) for module, name in real]
        counts = {"all_to_all_single": self._all_to_all, "isend": self._send, "send": self._send}
        counted: dict[Any, Any] = {}
        try:
            for module, name, function in real:
                if function not in counted:
                    counted[function] = self._counted(function, counts.get(name, self._gather))
                setattr(module, name, counted[function])
            yield self
        finally:
            for module, name, function in real:
                setattr(module, name, function)

    def _counted(self, function: Callable[..., Any], count: Callable[..., None]) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            count(*args, **kwargs)
            return function(*args, **kwargs)

        return counted

    def _send(
        self, tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None
    ) -> None:
        peer = dist.get_global_rank(group, group_dst) if dst is None else dst
        if current().node_of(peer) != current().node_of(dist.get_rank()):
            self.messages += 1
            self.payload += tensor.nbytes

    def _all_to_all(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        **_: Any,
    ) -> None:
        far = self.far(group)
        sizes = input_split_sizes
        if sizes is None:
            sizes = [len(input) // len(far)] * len(far)
        row = input.nbytes // max(1, len(input))
        sent = [int(size) for size, away in zip(sizes, far, strict=True) if away and size]
        self.messages += len(sent)
        self.payload += sum(sent) * row

    def _gather(self, first: Any, second: Any = None, *_: Any, **kwargs: Any) -> None:
        tensor = second if hasattr(second, "nbytes") else first
        peers = sum(self.far(kwargs.get("group")))
        self.messages += peers
        self.payload += peers * getattr(tensor, "nbytes", 0)

    def far(self, group: Any) -> list[bool]:
        """Of each member of a group, whether it is on another node than this rank."""
        if group not in self._far:
            here = current().node_of(dist.get_rank())
            ranks = dist.get_process_group_ranks(group)
            self._far[group] = [current().node_of(rank) != here for rank in ranks]
        return self._far[group]


def asleep(start: tuple[float, float, float] | None = None) -> Any:
    """Without `start` a mark, with one the seconds since it in which this thread slept.

    That is time neither on a CPU nor in wait of one (the kernel's schedstat): the thread, which has
    no other reason to sleep, waited for data. None where the kernel keeps no such times.
    """
    try:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        running, queued, _ = path.read_text().split()
    except OSError:
        return None
    now = (time.perf_counter(), int(running) / 1e9, int(queued) / 1e9)
    if start is None:
        return now
    wall, running, queued = (b - a for a, b in zip(start, now, strict=True))
    return max(0.0, wall - running - queued)
