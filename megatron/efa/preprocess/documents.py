"""Where documents come from: JSON lines or plain text, in files that may be gzipped.

Inputs are cut into chunks that a worker reads by itself, so the parent only looks for line ends.
The order of chunks, and of documents in a chunk, is the order of the inputs: it is all that decides
the output, however many workers there are.
"""

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.efa.errors import EfaError

Format = Literal["auto", "jsonl", "text"]
Split = Literal["file", "paragraph", "line"]

CHUNK_BYTES = 1 << 20
_TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst"}


@dataclass(frozen=True)
class Source:
    """A file, or the part of a JSONL file from byte `start` to byte `end` (both at line starts)."""

    path: Path
    format: Literal["jsonl", "text"]
    size: int  # bytes on disk, of the part
    start: int = 0

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def gzipped(self) -> bool:
        return self.path.suffix == ".gz"


@dataclass(frozen=True)
class Chunk:
    """What one worker encodes at a time: part of a source, read by the worker unless in `data`."""

    source: Source
    start: int  # offset in the (uncompressed) file
    size: int
    data: bytes | None = None

    def read(self) -> bytes:
        """Return the bytes of the chunk; raises OSError."""
        if self.data is not None:
            return self.data
        with self.source.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)

    def place(self, position: int) -> str:
        """Return "FILE, line N" for the line at byte `position` of the chunk (slow: for errors)."""
        opener = gzip.open if self.source.gzipped else open
        with opener(self.source.path, "rb") as file:
            before = file.read(self.start + position)
        return f"{self.source.path}, line {before.count(b'\n') + 1}"


def find(patterns: Sequence[str], wanted: Format) -> list[Source]:
    """Return the files that the globs name, in the order of the globs and sorted within each.

    Raises EfaError if a glob names no file, or a file cannot be read or is named twice.
    """
    sources: dict[Path, Source] = {}
    for pattern in patterns:
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if not Path(name).is_dir()]
        if not files:
            raise EfaError(f"--input {pattern} names no file: give a file or a glob in quotes")
        for file in files:
            if not file.is_file():
                raise EfaError(
                    f"--input {file} is no regular file: write what a pipe or device gives to one"
                )
            if file.resolve() in sources:
                raise EfaError(f"--input names {file} twice: its documents would be counted twice")
            kind = _format_of(file) if wanted == "auto" else wanted
            sources[file.resolve()] = Source(file, kind, file.stat().st_size)
    return list(sources.values())


def _format_of(file: Path) -> Literal["jsonl", "text"]:
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    return "text" if suffixes and suffixes[-1] in _TEXT_SUFFIXES else "jsonl"


def partition(sources: Sequence[Source], parts: int) -> list[list[Source]]:
    """Cut the inputs, in order, into at most `parts` runs of about equal size on disk.

    Only an uncompressed JSONL file is cut inside; joined again, the runs are the inputs.
    """
    total = max(1, sum(source.size for source in sources))
    bounds = [-(-total * i // parts) for i in range(1, parts)]
    runs: list[list[Source]] = [[] for _ in range(parts)]
    before = 0
    for source in sources:
        for piece in _cut(source, [bound - before for bound in bounds]):
            at = before + piece.start - source.start
            runs[min(at * parts // total, parts - 1)].append(piece)
        before += source.size
    return [run for run in runs if run]


def _cut(source: Source, bounds: Sequence[int]) -> Iterator[Source]:
    """Cut a source at the first line starts at or after each of `bounds` (bytes from its start)."""
    start = source.start
    for bound in bounds if _divisible(source) else ():
        if 0 < bound < source.size:
            stop = min(_line_start(source.path, source.start + bound), source.end)
            if start < stop < source.end:
                yield Source(source.path, source.format, stop - start, start)
                start = stop
    yield Source(source.path, source.format, source.end - start, start)


def chunks(sources: Sequence[Source], size: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cut the inputs into chunks of whole lines, about `size` bytes each; a text file is one."""
    for source in sources:
        if source.gzipped:
            yield from _unzipped(source, size)
        elif not _divisible(source):
            yield Chunk(source, source.start, source.size)
        else:
            start = source.start
            while start < source.end:
                stop = min(_line_start(source.path, start + size), source.end)
                yield Chunk(source, start, stop - start)
                start = stop


def _divisible(source: Source) -> bool:
    return source.format == "jsonl" and not source.gzipped


def _line_start(path: Path, offset: int) -> int:
    """Return the first start of a line at or after `offset`, at most the file's size."""
    with path.open("rb") as file:
        file.seek(offset - 1)
        file.readline()
        return file.tell()


def _unzipped(source: Source, size: int) -> Iterator[Chunk]:
    start = 0
    try:
        with gzip.open(source.path, "rb") as file:
            while True:
                data = file.read(size if source.format == "jsonl" else -1)
                data += file.readline()
                if not data:
                    return
                yield Chunk(source, start, len(data), data)
                start += len(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise EfaError(f"{source.path} is not whole gzip data ({error}): fetch it again") from error


def documents(chunk: Chunk, keys: Sequence[str], split: Split) -> Iterator[tuple[int, list[Any]]]:
    """Yield each document of a chunk: its byte position and its value under every key.

    Raises EfaError naming file and line for a line that is not a JSON object or lacks a key, and
    for text that is not UTF-8.
    """
    data = chunk.read()
    if chunk.source.format == "jsonl":
        position = 0
        for line in data.split(b"\n"):
            if line.strip():
                yield position, _values(chunk, position, line, keys)
            position += len(line) + 1
        return
    for position, part in _text_parts(data, split):
        try:
            yield position, [part.decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            place = chunk.place(position + error.start)
            raise EfaError(f"{place}: not UTF-8 ({error.reason}): convert the file") from error


def _values(chunk: Chunk, position: int, line: bytes, keys: Sequence[str]) -> list[Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, too deep
        place = chunk.place(position)
        raise EfaError(f"{place}: not JSON ({error}): mend or remove the line") from error
    if not isinstance(record, dict):
        place = chunk.place(position)
        raise EfaError(f"{place}: a {type(record).__name__}, where a JSON object is expected")
    missing = [key for key in keys if key not in record]
    if missing:
        raise EfaError(
            f"{chunk.place(position)}: no key '{missing[0]}' (it has: "
            f"{', '.join(sorted(record)) or 'none'}): see --json-keys"
        )
    return [record[key] for key in keys]


def _text_parts(data: bytes, split: Split) -> Iterator[tuple[int, bytes]]:
    """Yield (position, bytes) of each document; separators and blank documents are left out."""
    if split == "file":
        yield 0, data
        return
    part: list[bytes] = []
    begin = position = 0
    for line in data.splitlines(keepends=True):
        blank = not line.strip()
        if part and (blank or split == "line"):
            yield begin, b"".join(part).rstrip(b"\r\n")
            part = []
        if not blank:
            begin = begin if part else position
            part.append(line)
        position += len(line)
    if part:
        yield begin, b"".join(part).rstrip(b"\r\n")
