"""Upstream's refusals as sentences: what it raises before training, and at what values."""

import itertools
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from megatron.efa.errors import EfaError


@contextmanager
def as_sentences() -> Iterator[None]:
    """Turn what upstream raises while it checks arguments into EfaError."""
    try:
        yield
    except EfaError:
        raise
    except SystemExit as stop:
        if stop.code in (None, 0):  # upstream refuses some flags with a message and a bare exit()
            raise EfaError("Megatron refuses these arguments; its reason stands above") from stop
        raise
    except (AssertionError, ValueError, RuntimeError, OSError, ImportError) as error:
        raise EfaError(sentence(error)) from error


def of_setup(error: Exception) -> bool:
    """Whether `error`, out of `pretrain`, is a check of upstream's on the way to training.

    It is if upstream's own code raised it and the training loop had not begun. Everything else, an
    error out of torch above all, is no sentence to an operator and keeps its traceback.
    """
    if not isinstance(error, AssertionError | ValueError | RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    places = [(Path(frame.filename).parts[-3:], frame.name) for frame in frames]
    in_loop = (("megatron", "training", "training.py"), "train") in places
    raised_in = Path(frames[-1].filename).parts
    return not in_loop and not {("megatron", "core"), ("megatron", "training")}.isdisjoint(
        itertools.pairwise(raised_in)
    )


def sentence(error: Exception) -> str:
    """One line for an exception of upstream's: its message, and where it was raised.

    A check without a message is told by its condition and the arguments in it.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    if not message:
        condition = (frame.line or "").removeprefix("assert ").rstrip(", ")
        values = _values(condition, error.__traceback__)
        message = f"this does not hold: {condition}{f', with {values}' if values else ''}"
    if not isinstance(error, AssertionError | ValueError):
        message = f"{type(error).__name__}: {message}"
    return f"{message} (Megatron's check at {Path(frame.filename).name}:{frame.lineno})"


def _values(condition: str, trace: TracebackType | None) -> str:
    """`x = 3 and y = 4` for the `args.x` and `self.y` of a condition, where it was checked."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    names = trace.tb_frame.f_locals if trace is not None else {}
    found = {}
    for owner, name in re.findall(r"\b(\w+)\.(\w+)", condition):
        value = getattr(names.get(owner), name, names)
        if value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    return " and ".join(f"{name} = {value!r}" for name, value in found.items())
