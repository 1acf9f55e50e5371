"""Runs the pieces of a collective: what is in flight together, who waits, and the handle.

In a round the youngest piece goes on first, then the older ones, and then the next piece enters.
So a piece's rail transfer is queued while that of the piece before it is still on the rail, and
transfers in the node run beside them:

    round      1        2        3        4
    piece 0    node     rail     node
    piece 1             node     rail     node
    piece 2                      node     rail  ...

Where pieces begin on the rail (`rail_first`), the next one enters before the others go on, and for
the same end: that the rail is never without a transfer.

That order is the same on all ranks, whatever the timing, so that transfers of one communicator
match. On GPUs nothing waits on the host: each piece has a CUDA stream, which waits for its
transfers. On CPUs a thread of the group's waits; a group's collectives run one after the other.
"""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from megatron.efa.comm.transfers import Stage
from megatron.efa.groups import TwoLevel
from megatron.efa.traffic import watch

STREAMS = 4
"""CUDA streams of a group: pieces that can be in flight at one time."""


class Handle:
    """An asynchronous collective. Also what one is that had nothing to do."""

    exposed = 0.0
    """Seconds that `wait` blocked the host (on GPUs it does not: the stream waits)."""

    def wait(self, timeout: Any = None) -> bool:
        """Return once the result is in place (on GPUs: once the current stream will see it).

        The process group's timeout, not `timeout`, ends a transfer. Raises what it raised.
        """
        return True

    def is_completed(self) -> bool:
        return True


class _Events(Handle):
    """The collective on CUDA streams; keeps its tensors until somebody waits for them."""

    def __init__(self, events: list[Any], tensors: Sequence[torch.Tensor]) -> None:
        self._events, self._tensors = events, tensors

    def wait(self, timeout: Any = None) -> bool:
        for event in self._events:
            torch.cuda.current_stream().wait_event(event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return all(event.query() for event in self._events)


class _Job(Handle):
    """The collective on a thread."""

    def __init__(self, pieces: Sequence[Stage], rail_first: bool) -> None:
        self._pieces, self._rail_first, self._error = pieces, rail_first, None
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            with watch.inside():
                rounds(self._pieces, rail_first=self._rail_first)
        except BaseException as error:
            self._error = error
        finally:
            self._pieces = ()
            self._ended.set()

    def wait(self, timeout: Any = None) -> bool:
        start = time.perf_counter()
        self._ended.wait()
        self.exposed += time.perf_counter() - start
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()


class _Lane:
    """Where a group's collectives are run, in the order in which they were called."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._last: _Job | None = None
        self._thread: threading.Thread | None = None
        self._streams: list[Any] = []
        self._used = 0

    def run(
        self,
        pieces: Sequence[Stage],
        tensors: Sequence[torch.Tensor],
        async_op: bool,
        rail_first: bool,
    ) -> Handle | None:
        if tensors[0].is_cuda:
            return self.on_gpu(pieces, tensors, async_op, rail_first)
        return self.on_cpu(pieces, async_op, rail_first)

    def on_cpu(self, pieces: Sequence[Stage], async_op: bool, rail_first: bool) -> Handle | None:
        job = _Job(pieces, rail_first)
        if not async_op and (self._last is None or self._last.is_completed()):
            job.run()
        else:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work_off, args=(self._jobs,), name="efa-comm", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._jobs.put, None)
            self._jobs.put(job)
            self._last = job
        if async_op:
            return job
        job.wait()
        return None

    def on_gpu(
        self,
        pieces: Sequence[Stage],
        tensors: Sequence[torch.Tensor],
        async_op: bool,
        rail_first: bool,
    ) -> Handle | None:
        if not self._streams:
            self._streams = [torch.cuda.Stream(tensors[0].device) for _ in range(STREAMS)]
        # The next collective begins on the next stream, so as not to queue behind this one.
        streams = [self._streams[(self._used + i) % STREAMS] for i in range(STREAMS)]
        used = streams[: len(pieces)]
        self._used += len(pieces)
        for stream in used:
            stream.wait_stream(torch.cuda.current_stream())
        with watch.inside():
            rounds(pieces, streams, rail_first)
        handle = _Events([stream.record_event() for stream in used], tensors)
        if async_op:
            return handle
        handle.wait()
        return None


def _work_off(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    for job in iter(jobs.get, None):
        job.run()


@torch.no_grad()
def rounds(pieces: Sequence[Stage], streams: Sequence[Any] = (), rail_first: bool = False) -> None:
    """Run `pieces` to their end, the i-th under CUDA stream i % len(streams) if there are any."""
    waiting = deque(enumerate(pieces))
    active: list[tuple[int, Stage, Any]] = []  # youngest first, with the work that each waits for
    while waiting or active:
        entering = [(*waiting.popleft(), None)] if waiting else []
        ahead = [*entering, *active] if rail_first else [*active, *entering]
        after = [(i, piece, _advance(i, piece, work, streams)) for i, piece, work in ahead]
        after = [entry for entry in after if entry[2] is not None]
        active = sorted(after, key=lambda entry: -entry[0])


def _advance(index: int, piece: Stage, work: Any, streams: Sequence[Any]) -> Any | None:
    """Let `piece` go on after `work`; returns what it waits for next, None at its end."""
    with torch.cuda.stream(streams[index % len(streams)]) if streams else nullcontext():
        if work is not None:
            work.wait()
        return next(piece, None)


_lanes: weakref.WeakKeyDictionary[Any, _Lane] = weakref.WeakKeyDictionary()
"""By rail, which stands for a group and a purpose; gone with it."""


def launch(
    two: TwoLevel,
    pieces: Sequence[Stage],
    tensors: Sequence[torch.Tensor],
    async_op: bool,
    rail_first: bool = False,
) -> Handle | None:
    """Run `pieces`, which read and write `tensors`; None, or the handle if `async_op`."""
    group = two.rail or two.flat
    if (lane := _lanes.get(group)) is None:
        lane = _lanes[group] = _Lane()
    on_gpu = tensors[0].is_cuda
    if async_op:
        return watch.handle(lane.run(pieces, tensors, async_op, rail_first), two.flat, on_gpu)
    with watch.waiting(two.flat, on_gpu):
        return lane.run(pieces, tensors, async_op, rail_first)
