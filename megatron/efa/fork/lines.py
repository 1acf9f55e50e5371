"""Files as lines that know where they come from: the base (owner 0) or the patch of that number.

The state after patch k is the lines whose owner is at most k, so applying a series and writing it
down again are two readings of one structure, and hunk positions never have to be guessed by a diff.
"""

import io
from collections.abc import Callable, Iterable
from dataclasses import replace

from megatron.efa.errors import EfaError
from megatron.efa.fork.series import Hunk, Patch, beside

Lines = list[tuple[bytes, int]]
"""(line with its newline, owner) from the top of a file to its end."""


def split(data: bytes) -> list[bytes]:
    """Lines with their newlines; only the line feed ends a line, as for git."""
    return io.BytesIO(data).readlines()


def join(lines: Lines) -> bytes:
    """The bytes of the file."""
    return b"".join(text for text, _ in lines)


def apply(series: Iterable[Patch], read: Callable[[str], bytes | None]) -> dict[str, Lines]:
    """Lay the series over a base (`read(path)` gives a file or None); return the patched files.

    Raises:
        EfaError: a hunk does not apply: its file or line is not there, or has other neighbours.
    """
    files: dict[str, Lines] = {}
    for patch in series:
        for path in patch.paths:
            if path not in files:
                base = read(path)
                if base is None:
                    raise EfaError(
                        f"patches/{patch.name} does not apply: the release has no {path}; "
                        "restore the patch with git, or move to its release by "
                        "`megatron-efa fork rebase`"
                    )
                files[path] = [(text, 0) for text in split(base)]
            shift = 0
            for hunk in (hunk for hunk in patch.hunks if hunk.path == path):
                _insert(files[path], patch, hunk, shift)
                shift += len(hunk.lines)
    return files


def _insert(lines: Lines, patch: Patch, hunk: Hunk, shift: int) -> None:
    at = hunk.after + shift
    before, behind = _neighbours(lines, at)
    lost = ""
    if at > len(lines):
        lost = f"the file has {len(lines) - shift} lines only"
    elif before and not before.endswith(b"\n"):
        lost = "the line before it has no newline"
    elif hunk.beside and hunk.beside != beside(before, behind):
        lost = "the lines beside it are not those that it was written for"
    if lost:
        raise EfaError(
            f"patches/{patch.name} does not apply after line {hunk.after} of {hunk.path}: {lost}; "
            "restore patches/ with git, make the edit in megatron/, run `megatron-efa fork export`"
        )
    lines[at:at] = [(text, patch.number) for text in hunk.lines]


def _neighbours(lines: Lines, at: int) -> tuple[bytes, bytes]:
    before = lines[at - 1][0] if 0 < at <= len(lines) else b""
    return before, lines[at][0] if at < len(lines) else b""


def hunks(path: str, lines: Lines, number: int) -> list[Hunk]:
    """The hunks of patch `number` in one file: its runs of lines in the state after that patch."""
    state = [(text, owner) for text, owner in lines if owner <= number]
    found: list[Hunk] = []
    at = after = 0
    while at < len(state):
        end = at
        while end < len(state) and state[end][1] == number:
            end += 1
        if end > at:
            before = state[at - 1][0] if at else b""
            behind = state[end][0] if end < len(state) else b""
            run = tuple(text for text, _ in state[at:end])
            found.append(Hunk(path, after, run, beside(before, behind)))
            at = end
        else:
            at, after = at + 1, after + 1
    return found


def rewritten(patch: Patch, files: dict[str, Lines], number: int | None = None) -> Patch:
    """The patch as the lines of owner `number` (its own, if not given), under its own header.

    Files stay in the order of the patch, new ones come behind in that of their names.
    """
    number = patch.number if number is None else number
    order = [path for path in patch.paths if path in files]
    order += sorted(files.keys() - set(order))
    found = [hunk for path in order for hunk in hunks(path, files[path], number)]
    return replace(patch, number=number, hunks=tuple(found))


def without_series(series: list[Patch], path: str, data: bytes) -> bytes | None:
    """Take the series out of one patched file again; None if its lines are not where they belong.

    What is left is the base file, so its hash says whether the file is exactly base + series.
    """
    lines = split(data)
    for patch in reversed(series):
        # Line numbers in a patch are those before it, so with its hunks taken in order each one's
        # lines stand at `after` once the earlier hunks of the same patch are gone.
        for hunk in (hunk for hunk in patch.hunks if hunk.path == path):
            end = hunk.after + len(hunk.lines)
            if tuple(lines[hunk.after : end]) != hunk.lines:
                return None
            del lines[hunk.after : end]
    return b"".join(lines)
