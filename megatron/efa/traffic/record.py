"""What one rank did in one step: transfers, and waits for them, on the step's clock.

On CPUs a time is a host's; on GPUs it is a CUDA event, so that nothing waits while a step is
recorded. The step's end turns both into seconds since its beginning.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.efa.traffic.routes import Sent

Mark = Any
"""A float (host) or a torch.cuda.Event, on the stream that was current."""
Interval = tuple[float, float]
"""Seconds since the beginning of the step."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One call of torch.distributed."""

    op: str
    axis: str
    sent: Sent
    far: bool
    """Whether it ends only when ranks of other nodes have done their part."""
    start: Mark
    end: Mark | None = None
    """None if nobody could tell: gloo's sends do not say when they end, unless somebody waits."""
    paired: bool = False
    """A receive that began with a send of as much, as in our exchanges: in flight, unlike others,
    for which the sender may not be ready."""
    group: Any = None
    work: Any = None
    """Of NCCL: knows how long the transfer took on its own stream."""


@dataclass(slots=True, eq=False)
class Wait:
    """A time in which the host (CPUs) or the current stream (GPUs) could do nothing else."""

    axis: str
    start: Mark
    end: Mark


@dataclass(slots=True)
class Timed:
    """A transfer or, where `op` is "wait", a wait, on the step's clock."""

    op: str
    axis: str
    start: float
    end: float | None
    sent: Sent = field(default_factory=Sent)
    far: bool = False
    paired: bool = False


@dataclass
class Step:
    """A recorded step of this rank, at its end."""

    number: int
    began: float
    """Seconds since the epoch."""
    seconds: float
    transfers: list[Timed]
    waits: list[Timed]


@dataclass
class Recording:
    """Fills up while a step runs. Lists are appended to from several threads."""

    transfers: list[Transfer] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._began, self._epoch = time.perf_counter(), time.time()
        self._event = self.now(on_gpu=True) if self._on_gpu else None

    def now(self, on_gpu: bool) -> Mark:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self, number: int) -> Step:
        """Wait for the device, and turn marks into seconds."""
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._began
        waits = [
            Timed("wait", wait.axis, self._seconds(wait.start), self._seconds(wait.end))
            for wait in self.waits
        ]
        return Step(number, self._epoch, seconds, self._timed(seconds), waits)

    def _timed(self, last: float) -> list[Timed]:
        before: dict[Any, float] = {}  # the end of each communicator's last transfer
        batches: dict[int, Interval] = {}  # of works, which the transfers of a batch share
        timed = []
        for each in self.transfers:
            start = self._seconds(each.start)
            end = None if each.end is None else self._seconds(each.end)
            took = _on_its_stream(each.work)
            if id(each.work) in batches:
                start, end = batches[id(each.work)]
            elif took is not None:
                end = last if end is None else end
                # One after another on a communicator; `end`, where somebody waited, is the latest.
                start = max(start, before.get(each.group, 0.0))
                end = min(end, start + took)
                start = max(0.0, min(start, end - took))
                before[each.group] = end
                batches[id(each.work)] = start, end
            end = None if end is None else max(start, end)
            timed.append(Timed(each.op, each.axis, start, end, each.sent, each.far, each.paired))
        self.transfers = []
        return timed

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark - self._began
        return self._event.elapsed_time(mark) / 1e3


def _on_its_stream(work: Any) -> float | None:
    """Seconds of a NCCL work between its events; None where there are none."""
    if work is None:
        return None
    try:
        return work._get_duration() / 1e3
    except RuntimeError:
        return None
