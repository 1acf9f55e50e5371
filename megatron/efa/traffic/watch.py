"""Watches torch.distributed: every transfer that anybody starts while a step is recorded.

`install` rebinds the functions, also where a module of Megatron's bound them when it was imported.
Outside recorded steps a call costs one look at a global. Of calls within calls (an alias, gloo's
all-gather of unequal parts, which is an all-to-all) the innermost counts: it moves the bytes.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.efa.groups.axes import axis_of
from megatron.efa.redirect import Redirection
from megatron.efa.traffic.record import Recording, Transfer, Wait
from megatron.efa.traffic.routes import AXES, CALLS, Described, members, waits_far

_AT_ONCE_S = 1e-4
"""A wait on a CPU that takes no longer found its transfer ended, some time before."""

recording: Recording | None = None
"""Of the step that is being recorded."""


class _Thread(threading.local):
    """Where this thread is: in a call (`calls`), in our stages (`inside`), in a batch."""

    calls: list[bool] | None = None
    inside: int = 0
    batch: list[Transfer] | None = None


_thread = _Thread()


def install() -> Redirection:
    """Watch from now on; the result's `undo` ends it."""
    redirection = Redirection()
    watched = {}
    for name, describe in CALLS.items():
        for module in (distributed_c10d, dist):  # on CPUs they differ: ours around torch's
            real = getattr(module, name, None)
            if real is not None and real not in watched:
                watched[real] = _watched(name, real, describe)
    manager = distributed_c10d._coalescing_manager
    watched[manager] = _watched_batch(manager)
    for module in _modules():
        for name, value in list(vars(module).items()):
            if callable(value) and _hashable(value) and value in watched:
                redirection.set(module, name, watched[value])
    return redirection


def _modules() -> list[Any]:
    named = ("megatron.", "torch.distributed")
    ours = __name__.rpartition(".")[0]
    return [
        module
        for name, module in list(sys.modules.items())
        if module is not None and name.startswith(named) and not name.startswith(ours)
    ]


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


def _watched(
    name: str, real: Callable[..., Any], describe: Callable[..., Described]
) -> Callable[..., Any]:
    @functools.wraps(real)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if recording is None:
            return real(*args, **kwargs)
        return _call(recording, name, real, describe(*args, **kwargs), args, kwargs)

    return watched


def _call(
    into: Recording,
    name: str,
    real: Callable[..., Any],
    described: Described,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    on_gpu = described.tensor is not None and described.tensor.is_cuda
    known = members(described.group)
    if known is None or known.size == 1 or (on_gpu and torch.cuda.is_current_stream_capturing()):
        return real(*args, **kwargs)
    outer, _thread.calls = _thread.calls, []
    start = into.now(on_gpu)
    try:
        work = real(*args, **kwargs)
        nested = bool(_thread.calls)
    finally:
        _thread.calls = outer
    if outer is not None:
        outer.append(True)
    if nested:
        return work
    group = described.group or dist.group.WORLD
    transfer = Transfer(
        name, known.axis, described.sent(known), waits_far(described, known), start, group=group
    )
    transfer.paired = described.source is not None and bool(_thread.inside)
    into.transfers.append(transfer)
    if _thread.batch is not None:
        _thread.batch.append(transfer)
        return work
    if work is None:  # it has been waited for
        transfer.end = into.now(on_gpu)
        if not _thread.inside:
            into.waits.append(Wait(known.axis, start, transfer.end))
        return None
    return Watched(work, [transfer], into, known.axis, on_gpu)


class Watched:
    """A work, or a handle of our collectives, that tells when it was waited for."""

    def __init__(
        self, work: Any, transfers: list[Transfer], into: Recording, axis: str, on_gpu: bool
    ) -> None:
        self._work, self._transfers, self._axis, self._on_gpu = work, transfers, axis, on_gpu
        self._into: Recording | None = into
        for transfer in transfers:
            transfer.work = work if on_gpu else None
        if transfers and not on_gpu:
            with suppress(RuntimeError):  # gloo's sends and sums have no future
                work.get_future().add_done_callback(self._done)

    def _done(self, _: Any) -> None:
        end = time.perf_counter()
        for transfer in self._transfers:
            transfer.end = transfer.end or end

    def wait(self, *timeout: Any) -> Any:
        """As the work's own."""
        into = self._into
        if into is None or into is not recording:  # waited for before, or in a later step
            return self._work.wait(*timeout)
        if _thread.inside and self._on_gpu:
            self._into = None
            return self._work.wait(*timeout)  # the stream of a stage waits, not the model's
        start = into.now(self._on_gpu)
        result = self._work.wait(*timeout)
        end, self._into = into.now(self._on_gpu), None
        if self._on_gpu or end - start > _AT_ONCE_S:
            for transfer in self._transfers:
                transfer.end = transfer.end or end
        if not _thread.inside:
            into.waits.append(Wait(self._axis, start, end))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _watched_batch(real: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def watched(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        into = recording
        if into is None or _thread.batch is not None:
            with real(group, device, async_ops) as manager:
                yield manager
            return
        _thread.batch = batch = []
        on_gpu, start = False, None
        try:
            with real(group, device, async_ops) as manager:
                yield manager
                on_gpu = bool(batch) and not isinstance(batch[0].start, float)
                start = into.now(on_gpu)
        finally:
            _thread.batch = None
        axis = batch[0].axis if batch else ""
        if async_ops and batch:
            works = [work for work in manager.works if work is not None]
            manager.works[:] = [Watched(work, batch, into, axis, on_gpu) for work in works]
        elif batch:
            end = into.now(on_gpu)
            for transfer in batch:
                transfer.end = end
            if not _thread.inside:
                into.waits.append(Wait(axis, start, end))

    return watched


@contextmanager
def inside() -> Iterator[None]:
    """Within, waits are those of a stage of ours: what waits for the stage is told by `handle`."""
    _thread.inside += 1
    try:
        yield
    finally:
        _thread.inside -= 1


@contextmanager
def waiting(group: Any, on_gpu: bool) -> Iterator[None]:
    """Tell that whoever is within waits for a collective of `group`."""
    into = recording
    if into is None or _thread.inside:
        yield
        return
    start = into.now(on_gpu)
    yield
    into.waits.append(Wait(_axis(group), start, into.now(on_gpu)))


def handle(made: Any, group: Any, on_gpu: bool) -> Any:
    """Let waits for `made`, a handle of a collective of `group`, be told."""
    if recording is None or made is None:
        return made
    return Watched(made, [], recording, _axis(group), on_gpu)


def _axis(group: Any) -> str:
    axis = axis_of(group)
    return AXES.get(axis, axis)
