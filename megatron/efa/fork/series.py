"""The patch series: how a patch is written, read and held to its rules.

A patch is `patches/NNNN-title.patch`: the header fields, then a unified diff without context that
only inserts lines. `git apply --unidiff-zero` accepts it, header included.

    Why: one sentence; a continuation line begins with a blank
    How: the call that it adds
    Upstream: a link, or why it cannot go there
    Removal: how one notices that it is no longer needed
    Test: tests/unit/test_something.py::test_that_fails_without_it

    diff --git a/megatron/core/x.py b/megatron/core/x.py
    --- a/megatron/core/x.py
    +++ b/megatron/core/x.py
    @@ -20,0 +21,2 @@ beside 1f2e3d4c
    +first inserted line
    +second inserted line

Line numbers are those after all earlier patches. Without context nothing but the number says where
a line belongs, so `export` writes a digest of the two neighbours (`beside ...`) behind each hunk
header; a hunk that would land beside other lines is refused. One written by hand may leave it out.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork.layout import PREFIXES

FIELDS = ("Why", "How", "Upstream", "Removal", "Test")
MAX_PATCHES = 15
MAX_LINES = 150

_NAME = re.compile(r"(\d{4})-([a-z0-9]+(?:-[a-z0-9]+)*)\.patch")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@ ?(?:beside ([0-9a-f]{8}))?")
_FIELD = re.compile(r"([A-Z][A-Za-z]*):(.*)")


@dataclass(frozen=True)
class Hunk:
    """Lines (each with its newline) inserted after line `after` of `path` (0: at the top)."""

    path: str
    after: int
    lines: tuple[bytes, ...]
    beside: str = ""  # digest of the neighbours, empty if the patch does not say


@dataclass(frozen=True)
class Patch:
    """One patch: its number in the series, title, header exactly as written, and hunks in order."""

    number: int
    title: str
    header: str
    hunks: tuple[Hunk, ...]

    @property
    def name(self) -> str:
        return f"{self.number:04d}-{self.title}.patch"

    @property
    def inserted(self) -> int:
        """Number of inserted lines."""
        return sum(len(hunk.lines) for hunk in self.hunks)

    @property
    def paths(self) -> list[str]:
        """The files it inserts into, in the order of the diff."""
        return list(dict.fromkeys(hunk.path for hunk in self.hunks))

    @property
    def fields(self) -> dict[str, str]:
        """Header fields with continuation lines joined by blanks."""
        fields: dict[str, str] = {}
        name = ""
        for line in self.header.splitlines():
            if match := _FIELD.fullmatch(line):
                name = match[1]
                fields[name] = match[2].strip()
            elif line.strip() and name:
                fields[name] = f"{fields[name]} {line.strip()}".strip()
        return fields

    def render(self) -> bytes:
        """The bytes of the patch file; `parse` gives an equal patch again."""
        out = [self.header.encode()]
        for path in self.paths:
            out.append(f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n".encode())
            shift = 0
            for hunk in (hunk for hunk in self.hunks if hunk.path == path):
                start, count = hunk.after + shift + 1, len(hunk.lines)
                new = f"{start}" if count == 1 else f"{start},{count}"
                beside = f" beside {hunk.beside}" if hunk.beside else ""
                out.append(f"@@ -{hunk.after},0 +{new} @@{beside}\n".encode())
                out.extend(b"+" + line for line in hunk.lines)
                shift += count
        return b"".join(out)


def beside(before: bytes, behind: bytes) -> str:
    """Digest of the line before and the line behind an insertion (empty at the ends of a file)."""
    return hashlib.sha256(before + b"\0" + behind).hexdigest()[:8]


def parse(name: str, data: bytes) -> Patch:
    """Read one patch file.

    Raises:
        EfaError: naming file and line, if the name or the diff is not of the form described above.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise EfaError(
            f"patches/{name}: a patch is called NNNN-words-in-lower-case.patch, rename it"
        )
    lines = data.split(b"\n")
    if lines.pop():
        raise EfaError(f"patches/{name}: the last line has no newline, add one")
    begin = next(
        (i for i, text in enumerate(lines) if text.startswith((b"diff --git ", b"--- a/"))), -1
    )
    if begin < 0:
        raise EfaError(
            f"patches/{name}: there is no diff after the header, so delete it or fill it"
        )
    try:
        header = "".join(line.decode() + "\n" for line in lines[:begin])
    except UnicodeDecodeError:
        raise EfaError(f"patches/{name}: the header is not UTF-8, save it as such") from None
    return Patch(int(match[1]), match[2], header, _parse_diff(name, lines, begin))


def _parse_diff(name: str, lines: list[bytes], begin: int) -> tuple[Hunk, ...]:
    hunks: list[Hunk] = []
    path, shift, row = "", 0, begin

    def refuse(what: str) -> EfaError:
        return EfaError(
            f"patches/{name}:{row + 1}: {what}; make the edit in megatron/ itself and run "
            "`megatron-efa fork export`"
        )

    while row < len(lines):
        line = lines[row]
        if line.startswith((b"diff --git ", b"index ")):
            row += 1
        elif line.startswith(b"--- a/"):
            path, shift = line[6:].decode(), 0
            if not path.startswith(PREFIXES) or ".." in path.split("/"):
                raise refuse(f"{path} lies outside megatron/core and megatron/training")
            if lines[row + 1 : row + 2] != [f"+++ b/{path}".encode()]:
                raise refuse(
                    "the patch renames, creates or deletes a file, but it may insert lines only"
                )
            if any(hunk.path == path for hunk in hunks):
                raise refuse(f"{path} has two sections in one patch")
            row += 2
        elif (match := _HUNK.match(line)) and path:
            after, new = int(match[1]), int(match[3])
            count = 1 if match[4] is None else int(match[4])
            if match[2] != b"0":
                raise refuse(
                    "the hunk removes upstream lines or has context, but it may insert only"
                )
            body = lines[row + 1 : row + 1 + count]
            if count == 0 or len(body) < count or not all(text[:1] == b"+" for text in body):
                raise refuse(
                    f"the hunk does not consist of the {count} inserted lines it announces"
                )
            if new != after + shift + 1 or any(h.path == path and h.after >= after for h in hunks):
                raise refuse("the hunk's line numbers do not follow from the hunks before it")
            mark = match[5].decode() if match[5] else ""
            hunks.append(Hunk(path, after, tuple(text[1:] + b"\n" for text in body), mark))
            shift += count
            row += 1 + count
        else:
            raise refuse("this is no line of an insert-only diff without context")
    if not hunks:
        raise refuse("the diff inserts nothing")
    return tuple(hunks)


def load(directory: Path) -> list[Patch]:
    """All patches of `directory` in order, numbered from 1 without a gap.

    Raises:
        EfaError: a patch cannot be read, or a number is missing or taken twice.
    """
    series = [parse(path.name, path.read_bytes()) for path in sorted(directory.glob("*.patch"))]
    for expected, patch in enumerate(series, start=1):
        if patch.number != expected:
            raise EfaError(
                f"patches/{patch.name}: the series should go on with {expected:04d} here, "
                "so give each patch its own number, without a gap"
            )
    return series


def digest(pin_sha256: str, series: Iterable[Patch]) -> str:
    """Identifies the tree that base and series make; headers and order of files do not count."""
    total = hashlib.sha256(pin_sha256.encode())
    for patch in series:
        for hunk in sorted(patch.hunks, key=lambda hunk: hunk.path):  # in a file they are in order
            total.update(f"\n{patch.number} {hunk.path} {hunk.after} {len(hunk.lines)}\n".encode())
            total.update(b"".join(hunk.lines))
    return total.hexdigest()


def check_rules(root: Path, series: list[Patch]) -> None:
    """Hold the series to its rules beyond syntax: header fields, a test that exists, the budget.

    Raises:
        EfaError: the first rule that is broken, with file and field.
    """
    for patch in series:
        fields = patch.fields
        for name in FIELDS:
            if not fields.get(name):
                raise EfaError(
                    f"patches/{patch.name}: the header field `{name}:` is empty, fill it in"
                )
        test = fields["Test"].split()[0].split("::")[0]
        if not (test.startswith("tests/") and (root / test).is_file()):
            raise EfaError(
                f"patches/{patch.name}: `Test:` must begin with a file under tests/, "
                f"but {test} is none, so name the test that fails without the patch"
            )
    lines = sum(patch.inserted for patch in series)
    if len(series) > MAX_PATCHES or lines > MAX_LINES:
        raise EfaError(
            f"patches/ holds {len(series)} patches with {lines} inserted lines, but the budget is "
            f"{MAX_PATCHES} and {MAX_LINES}, so move logic into megatron.efa"
        )
