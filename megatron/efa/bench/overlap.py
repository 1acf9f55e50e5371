"""When rails, nodes and the layer's own work are busy at once, in one recorded turn of a rank."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from megatron.efa.traffic import watch
from megatron.efa.traffic.record import Recording
from megatron.efa.traffic.times import FABRIC, NODE, exposed, in_flight, length, shared


@dataclass
class Busy:
    """Seconds of one turn."""

    turn_s: float = 0.0
    rail_s: float = 0.0
    """With a transfer to another node under way."""
    node_s: float = 0.0
    """With a transfer inside the node under way."""
    both_s: float = 0.0
    """With both."""
    waited_s: float = 0.0
    """In which the rank (GPU: its current stream) could do nothing but wait."""


@contextmanager
def recorded(trace: Path | None) -> Iterator[Busy]:
    """Fill in the result from what is done within; write torch's trace of it to `trace`."""
    busy = Busy()
    installed = watch.install()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = nullcontext() if trace is None else torch.profiler.profile(activities=activities)
    try:
        with profiler as profiled:
            watch.recording = recording = Recording()
            yield busy
            watch.recording = None
            step = recording.finish(1)
    finally:
        watch.recording = None
        installed.undo()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiled.export_chrome_trace(str(trace))
    rail, node = in_flight(step, FABRIC), in_flight(step, NODE)
    busy.turn_s, busy.waited_s = step.seconds, exposed(step)
    busy.rail_s, busy.node_s = length(rail), length(node)
    busy.both_s = length(shared(rail, node))


def of_ranks(seen: Sequence[Busy | None]) -> dict[str, Any]:
    """Medians over ranks, in ms, by name; None where nothing was recorded."""
    names = [field.name for field in fields(Busy)]
    found = [asdict(busy) for busy in seen if busy is not None]
    return {
        f"profile_{name.removesuffix('_s')}_ms": statistics.median(1e3 * one[name] for one in found)
        if found
        else None
        for name in names
    }
