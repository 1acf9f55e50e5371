"""How far a run has come, from its folder; works while it runs and after."""

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.efa.launch import record

# Megatron's line of a log interval (megatron-core 0.19.2, training/training.py, training_log).
_LINE = re.compile(
    r" iteration +(?P<step>\d+)/ *(?P<steps>\d+) \|.* elapsed time per iteration \(ms\): "
    r"(?P<ms>[\d.]+) \|.* global batch size: +(?P<batch>\d+) \|(?:.*? lm loss: (?P<loss>[-+.\dEenaif]+))?"
)
_FAILED = re.compile(r"failed-code-(?P<code>\d+)-(?P<who>.+)-on-(?P<host>.+)")


@dataclass(frozen=True)
class Step:
    """One line of Megatron's."""

    step: int
    steps: int
    ms: float
    batch: int
    loss: float | None


@dataclass(frozen=True)
class Progress:
    """What is known of a run."""

    launched: dict[str, Any]
    state: str
    """rendered, running, done, failed, stopped or requeued."""
    code: int
    attempts: int
    failures: list[str]
    """Of each attempt, who failed first and how."""
    steps: list[Step]
    """Each step once, as it was computed last."""
    checkpoint: int | None
    """Step of the last checkpoint."""

    @property
    def tokens_per_s(self) -> float | None:
        """By the median of the last 10 lines."""
        recent, length = self.steps[-10:], self.launched.get("seq_length")
        if not recent or not length:
            return None
        return recent[-1].batch * length / (statistics.median(s.ms for s in recent) / 1e3)


def read(run: Path) -> Progress:
    """What folder `run` tells. Raises EfaError if there is no run."""
    launched = record.read(run)
    attempts = attempts_of(run)
    by_step: dict[int, Step] = {}
    for attempt in attempts:
        if (file := last_rank(attempt, "stdout")) is not None:
            with file.open(errors="replace") as lines:
                found = list(parse(lines))
            if found:  # a restart computes steps after its checkpoint again
                by_step = {k: s for k, s in by_step.items() if k < found[0].step}
                by_step |= {step.step: step for step in found}
    state, code = _state(run, attempts)
    failures = [text for attempt in attempts if (text := failure(attempt))]
    return Progress(
        launched, state, code, len(attempts), failures,
        [by_step[k] for k in sorted(by_step)], _checkpoint(launched, run),
    )  # fmt: skip


def parse(lines: Iterable[str]) -> Iterable[Step]:
    """The steps that Megatron's lines tell."""
    for line in lines:
        if match := _LINE.search(line):
            loss = float(match["loss"]) if match["loss"] else None
            yield Step(
                int(match["step"]),
                int(match["steps"]),
                float(match["ms"]),
                int(match["batch"]),
                loss,
            )


def attempts_of(run: Path) -> list[Path]:
    """Folders of the attempts, in order."""
    found = (f for f in (run / "attempts").glob("*") if f.is_dir() and f.name.isdecimal())
    return sorted(found, key=lambda folder: int(folder.name))


def logs(attempt: Path, stream: str) -> dict[tuple[int, int], Path]:
    """(node, local rank) -> log of `stream` ("stdout" or "stderr") in an attempt's folder."""
    found = {}
    for file in attempt.glob(f"**/attempt_*/*/{stream}.log"):
        node = next((p for p in file.parts if p.startswith("node-")), "node-0")
        found[int(node.removeprefix("node-")), int(file.parent.name)] = file
    return found


def last_rank(attempt: Path, stream: str) -> Path | None:
    """The log of the last rank, which prints losses."""
    found = logs(attempt, stream)
    return found[max(found)] if found else None


def failure(attempt: Path) -> str | None:
    """Who failed first in an attempt, and with which exit code."""
    files = sorted(attempt.glob("failed-code-*"), key=lambda file: file.stat().st_mtime)
    match = _FAILED.fullmatch(files[0].name) if files else None
    if match is None:
        return None
    who = match["who"].replace("rank-", "rank ")
    code = int(match["code"])
    how = f"signal {code - 128}" if code > 128 else f"exit code {code}"
    return f"attempt {attempt.name}: {who} on {match['host']} ended first, with {how}"


def _state(run: Path, attempts: list[Path]) -> tuple[str, int]:
    try:
        state, code = (run / "state").read_text().split()
    except (OSError, ValueError):
        return ("running" if attempts else "rendered"), 0
    return state, int(code)


def _checkpoint(launched: dict[str, Any], run: Path) -> int | None:
    """The step that Megatron's tracker file names."""
    folder = Path(launched["workdir"]) / (launched["save"] or run / "checkpoints")
    try:
        return int((folder / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        return None
