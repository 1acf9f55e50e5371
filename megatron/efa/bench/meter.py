"""What one rank's collectives send to other nodes, and how long the rank is blocked in them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    blocked: float = 0.0
    """Seconds in which the rank did nothing but wait: in synchronous calls, and in `wait()`."""
    _far: dict[Any, list[bool]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator["Meter"]:
        """Rebind the functions of torch.distributed to counting ones."""
        real = [(dist, name) for name in ("all_to_all_single", "batch_isend_irecv", *_GATHERS)]
        # Upstream binds these when it is imported.
        real += [(mappings, name) for name in ("dist_all_gather_func", "dist_reduce_scatter_func")]
        real = [(module, name, getattr(module, name)) for module, name in real]
        try:
            for module, name, function in real:
                if name == "batch_isend_irecv":
                    setattr(module, name, self._batched(function))
                else:
                    count = self._all_to_all if name == "all_to_all_single" else self._gather
                    setattr(module, name, self._timed(function, count))
            yield self
        finally:
            for module, name, function in real:
                setattr(module, name, function)

    def _timed(self, function: Callable[..., Any], count: Callable[..., None]) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            count(*args, **kwargs)
            start = time.perf_counter()
            work = function(*args, **kwargs)
            if work is None:
                self.blocked += time.perf_counter() - start
                return None
            return _Work(work, self)

        return timed

    def _batched(self, function: Callable[..., Any]) -> Any:
        def batched(operations: list[Any]) -> Any:
            here = current().node_of(dist.get_rank())
            for operation in operations:
                if operation.op is dist.isend and current().node_of(operation.peer) != here:
                    self.messages += 1
                    self.payload += operation.tensor.nbytes
            return [_Work(work, self) for work in function(operations)]

        return batched

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


class _Work:
    """A pending collective whose `wait` is timed."""

    def __init__(self, work: Any, meter: Meter) -> None:
        self._work, self._meter = work, meter

    def wait(self, *args: Any) -> Any:
        start = time.perf_counter()
        done = self._work.wait(*args)
        self._meter.blocked += time.perf_counter() - start
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
