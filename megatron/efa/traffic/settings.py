"""Which steps are recorded, by Megatron's arguments."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.efa.cluster.current import current
from megatron.efa.errors import EfaError


@dataclass
class _Asked:
    interval: int
    folder: Path | None
    trace: int | None
    """The step whose transfers are written one by one."""
    installed: Any = None


_asked: _Asked | None = None


def configure(args: Namespace) -> None:
    """Record the steps that `args` ask for. Raises EfaError for what cannot be asked."""
    global _asked
    interval, trace = args.efa_traffic_interval or 0, args.efa_traffic_trace
    folder = None if args.efa_traffic_dir is None else Path(args.efa_traffic_dir)
    if interval < 0:
        raise EfaError(f"--efa-traffic-interval {interval} is not a number of steps")
    if trace is not None and (trace < 1 or folder is None):
        raise EfaError(
            f"--efa-traffic-trace {trace} needs a step of 1 or more, and --efa-traffic-dir to "
            "write to"
        )
    if folder is not None and not interval and trace is None:
        raise EfaError(
            f"--efa-traffic-dir {folder} has nothing to hold: give --efa-traffic-interval as well"
        )
    cluster = current()
    if (interval or trace is not None) and cluster.world_size != args.world_size:
        raise EfaError(
            f"--efa-traffic-interval: the cluster (from {cluster.source or 'torchrun'}) holds "
            f"{cluster.world_size} ranks and this job has {args.world_size}: describe the nodes "
            "that it runs on"
        )
    forget()
    if interval or trace is not None:
        _asked = _Asked(interval, folder, trace)


def forget() -> None:
    """Record nothing from now on, and leave torch.distributed as it was."""
    global _asked
    if _asked is not None and _asked.installed is not None:
        from megatron.efa.traffic import watch

        watch.recording = None
        _asked.installed.undo()
    _asked = None


def begin(iteration: int | None) -> None:
    """A training step begins, after `iteration` others."""
    if _asked is None or iteration is None:
        return
    step = iteration + 1
    if step != _asked.trace and not (_asked.interval and step % _asked.interval == 0):
        return
    from megatron.efa.traffic import watch
    from megatron.efa.traffic.record import Recording

    if _asked.installed is None:
        _asked.installed = watch.install()
    watch.recording = Recording()


def end(iteration: int) -> None:
    """Training step `iteration` has ended: if it was recorded, report it."""
    if _asked is None:
        return
    from megatron.efa.traffic import report, watch

    recording, watch.recording = watch.recording, None
    if recording is None:
        return
    step = recording.finish(iteration)
    if iteration == _asked.trace:
        report.write_trace(step, _asked.folder)
    report.tell(step, _asked.folder)
