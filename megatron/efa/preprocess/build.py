"""Encoded documents to Megatron's `.bin` and `.idx` files, written aside and renamed when whole."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from megatron.efa import aside
from megatron.efa.errors import EfaError
from megatron.efa.preprocess.documents import Chunk, Source, chunks, partition
from megatron.efa.preprocess.encode import FORK, Encoder, encode, pool


@dataclass(frozen=True)
class Counts:
    """How much has been done: documents, the empty ones among them, tokens, bytes read."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.documents + other.documents,
            self.empty + other.empty,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
        )


Report = Callable[[Counts], None]
"""Called with what was done since the last call."""

_shared = FORK.Array("q", 4)
"""Counts of all partitions, so that the parent can show progress."""

_stop = FORK.Event()
"""Set when a partition failed or the run is interrupted: the other partitions then end early."""


def prefixes(prefix: Path, keys: Sequence[str]) -> list[Path]:
    """Return the path without suffix of each key's files, as Megatron's `--data-path` takes it."""
    return [prefix.with_name(f"{prefix.name}_{key}_document") for key in keys]


def build(
    encoder: Encoder,
    sources: Sequence[Source],
    prefix: Path,
    workers: int,
    partitions: int,
    report: Report,
) -> Counts:
    """Write `PREFIX_KEY_document.bin` and `.idx` for every key; only the input decides their bytes.

    Until all is written, files of these names stay as they were. Raises EfaError; whatever is
    raised, nothing half-written is left.
    """
    names = prefixes(prefix, encoder.keys)
    with _aside(prefix) as scratch:
        if partitions == 1:
            counts = _write(encoder, chunks(sources), scratch / prefix.name, workers, report)
        else:
            counts = _write_partitions(
                encoder, partition(sources, partitions), scratch / prefix.name, workers, report
            )
        for key, name in zip(encoder.keys, names, strict=True):
            if not (scratch / f"{name.name}.bin").stat().st_size:
                raise EfaError(
                    f"the input has no token under the key '{key}', and Megatron cannot read an "
                    "empty data set: nothing was written"
                )
        with aside.alone(prefix.parent):  # two runs to one output: the later one's files, not both
            _move(scratch, names)
    return counts


def _move(scratch: Path, names: Sequence[Path]) -> None:
    files = [
        name.with_name(f"{name.name}{suffix}") for name in names for suffix in (".bin", ".idx")
    ]
    for file in files:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    for name in names:
        # A reader needs both files: without the index nothing can be mistaken for whole.
        name.with_name(f"{name.name}.idx").unlink(missing_ok=True)
    for file in files:
        (scratch / file.name).replace(file)


@contextmanager
def _aside(prefix: Path) -> Iterator[Path]:
    """A folder beside the output that goes away in any case; OSError becomes EfaError."""
    opened = False
    try:
        with aside.beside(prefix) as scratch:
            opened = True
            yield scratch
    except OSError as error:
        if not opened:
            raise EfaError(f"cannot write to {prefix.parent} ({error.strerror})") from error
        place = error.filename2 or error.filename or prefix  # of a rename, where it goes
        raise EfaError(f"{place}: {error.strerror or error}") from error


def _write(
    encoder: Encoder, chunks: Iterator[Chunk], prefix: Path, workers: int, report: Report
) -> Counts:
    builders = _builders(encoder, prefix)
    total = Counts()
    for encoded in encode(encoder, chunks, workers):
        empty = tokens = 0
        for (_, builder), ids, lengths in zip(builders, encoded.ids, encoded.lengths, strict=True):
            ends = np.cumsum([0, *map(sum, lengths)])
            for (start, end), sequences in zip(pairwise(ends), lengths, strict=True):
                builder.add_document(ids[start:end], sequences)
                empty += not sequences
            tokens += len(ids)
        done = Counts(len(encoded.lengths[0]), empty, tokens, encoded.size)
        report(done)
        total += done
    for name, builder in builders:
        builder.finalize(f"{name}.idx")
    return total


def _builders(encoder: Encoder, prefix: Path) -> list[tuple[Path, IndexedDatasetBuilder]]:
    dtype = DType.optimal_dtype(encoder.tokenizer.vocab_size)
    return [
        (name, IndexedDatasetBuilder(f"{name}.bin", dtype=dtype))
        for name in prefixes(prefix, encoder.keys)
    ]


def _write_partitions(
    encoder: Encoder, runs: list[list[Source]], prefix: Path, workers: int, report: Report
) -> Counts:
    """Write each run of inputs with a process of its own, then join them in order."""
    parts = [prefix.with_name(f"{prefix.name}.{i}") for i in range(len(runs))]
    _shared[:] = [0] * 4
    _stop.clear()
    seen = Counts()
    with pool(len(runs), Counts) as writers:
        futures = [
            writers.submit(_write_run, encoder, run, part, max(1, workers // len(runs)))
            for run, part in zip(runs, parts, strict=True)
        ]
        try:
            running = set(futures)
            while running:
                done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                now = Counts(*_shared[:])
                report(Counts(*(b - a for a, b in zip(_tuple(seen), _tuple(now), strict=True))))
                seen = now
                for future in done:
                    future.result()
        except BaseException:
            _stop.set()
            raise
    builders = _builders(encoder, prefix)
    for k, (name, builder) in enumerate(builders):
        for part in parts:
            builder.add_index(str(prefixes(part, encoder.keys)[k]))
        builder.finalize(f"{name}.idx")
    return seen


def _write_run(encoder: Encoder, run: list[Source], part: Path, workers: int) -> None:
    def report(done: Counts) -> None:
        if _stop.is_set():
            raise EfaError("stopped, for another partition failed")
        with _shared.get_lock():
            _shared[:] = [a + b for a, b in zip(_shared[:], _tuple(done), strict=True)]

    _write(encoder, chunks(run), part, workers, report)


def _tuple(counts: Counts) -> tuple[int, int, int, int]:
    return counts.documents, counts.empty, counts.tokens, counts.bytes
