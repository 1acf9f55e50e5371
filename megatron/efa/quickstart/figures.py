"""What a run did, read from what it left: event files, token files, the emulator's counters."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.efa.errors import EfaError

_AVERAGED = 10
"""Steps over which the training loss at the end is averaged: one step's batch is a few texts."""

_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
"""By the codes of megatron.core.datasets.indexed_dataset.DType."""

Curve = list[tuple[int, float]]
"""(step, value), in order."""


def tokens(prefix: Path) -> np.ndarray:
    """Return all tokens of `PREFIX.bin`, one document after the other: uint16 or int32 [tokens].

    Reads the two types that preprocess_data writes, without the seconds that importing Megatron
    takes. Raises EfaError.
    """
    index = prefix.with_name(f"{prefix.name}.idx")
    try:
        header = index.read_bytes()[:18]  # magic (9 bytes), version (8), type of the tokens (1)
        dtype = _TOKEN_TYPES.get(header[17]) if header[:9] == _MAGIC else None
        if dtype is None:
            raise EfaError(f"{index} is not the index of a token file: prepare the data again")
        return np.fromfile(prefix.with_name(f"{prefix.name}.bin"), dtype=dtype)
    except (OSError, IndexError) as error:
        raise EfaError(f"cannot read the tokens of {prefix} ({error})") from error


def unigram_entropy(prefix: Path) -> float:
    """Return the entropy, in nats a token, of the tokens in `PREFIX.bin` taken one by one.

    H = -sum(p ln p) over the frequencies p: no model that ignores context has a lower loss on them.
    """
    counts = np.unique(tokens(prefix), return_counts=True)[1]
    frequencies = counts / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def curves(events: Path, *names: str) -> dict[str, Curve]:
    """Return the named scalars of a TensorBoard folder; a name that is not there gives no points.

    A step that was written twice (a resumed run) counts as written last.
    """
    # The reader of event files without TensorFlow's and the web server's imports.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not any(events.glob("events.out.tfevents.*")):
        return {name: [] for name in names}
    reader = EventAccumulator(str(events), size_guidance={"scalars": 0})
    reader.Reload()
    known = reader.Tags()["scalars"]
    return {
        name: sorted({e.step: e.value for e in reader.Scalars(name)}.items())
        if name in known
        else []
        for name in names
    }


@dataclass(frozen=True)
class Learning:
    """Losses in nats a token."""

    steps: int
    first: float  # of the first step
    last: float  # mean of the last steps
    validation: Curve  # on held-out documents

    @property
    def averaged(self) -> int:
        return min(self.steps, _AVERAGED)


def learning(events: Path) -> Learning:
    """Read the losses of a run; raises EfaError if its event files hold none."""
    # Every point is one step's loss: only the printed losses are averaged over the log interval.
    found = curves(events, "lm loss", "lm loss validation")
    losses = found["lm loss"]
    if not losses:
        raise EfaError(f"no losses in the TensorBoard files of {events}: did the run train a step?")
    tail = [value for _, value in losses[-_AVERAGED:]]
    return Learning(
        losses[-1][0], losses[0][1], statistics.fmean(tail), found["lm loss validation"]
    )


def seconds_a_step(events: Path) -> float | None:
    """Return the median time of a training step, without validation and checkpoints."""
    # The first two averages hold the warm-up of the process.
    times = [value for _, value in curves(events, "iteration-time")["iteration-time"]]
    return statistics.median(times[2:] or times) if times else None


@dataclass(frozen=True)
class Traffic:
    """What the emulator counted."""

    isolated: bool
    sent_bytes: int | None  # by all nodes over the whole run; None: not counted
    seconds: float


def traffic(path: Path) -> Traffic:
    """Read the emulator's JSON; raises EfaError."""
    try:
        report = json.loads(path.read_text())
        links = report["links"]
        sent = None if links is None else sum(link["sent_bytes"] for link in links)
        return Traffic(report["isolated"], sent, report["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EfaError(f"{path} is not the emulator's report ({error!r})") from error
