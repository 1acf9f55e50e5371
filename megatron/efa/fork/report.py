"""What a rebase did, for the engineer who has to judge it.

A clean merge says where lines went, not that they mean the same there. So for each patch and file
the report says how much of it upstream changed, and how near to the inserted lines.
"""

import re
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork import lines
from megatron.efa.fork.git import git
from megatron.efa.fork.lines import Lines
from megatron.efa.fork.series import Hunk, Patch
from megatron.efa.fork.sync import check_compiles

_LEGEND = """\
clean: merged at the same line. moved: merged at another line. conflict: resolved by hand. dropped:
nothing was left to insert. Upstream: lines added and removed in the file between the releases.
Nearest: lines between an insertion and the closest of these changes; the nearer, the more a merge
without a conflict needs reading.
"""
_COLUMNS = ("patch", "file", "upstream", "nearest", "after line", "result", "compiles")
_HUNK = re.compile(rb"^@@ -(\d+)(?:,(\d+))? ", re.MULTILINE)


def render(
    repository: Path,
    series: list[Patch],
    moved: dict[int, Patch],
    version: str,
    conflicts: dict[str, list[str]],
    stopped: str = "",
) -> str:
    """The report in Markdown.

    Args:
        repository: the scratch repository, with branches `old-base` and `new-base`.
        series: the series before the rebase; moved: the patches after it, by their old number.
        conflicts: paths in which a patch (`NNNN`) had conflicts.
        stopped: the patch that waits for its conflicts to be resolved, if one does.
    """
    old_version = git(repository, "log", "-1", "--format=%s", "old-base").stdout.decode().strip()
    out = [f"# The series from {old_version} to {version}", "", _LEGEND]
    if stopped:
        out += [f"Not finished: patch {stopped} waits for its conflicts to be resolved.", ""]
    out += [_row(*_COLUMNS), _row(*["---"] * len(_COLUMNS))]
    files = lines.apply(series, lambda path: _show(repository, f"old-base:{path}"))
    for patch in series:
        for path in patch.paths:
            before = [hunk for hunk in patch.hunks if hunk.path == path]
            now = moved.get(patch.number)
            after = [hunk for hunk in now.hunks if hunk.path == path] if now else []
            number = f"{patch.number:04d}"
            waiting = bool(stopped) and number >= stopped
            row = _row(
                f"{number} {patch.title}",
                path,
                *_upstream(repository, path, files[path], patch.number),
                f"{_places(before)} -> {'?' if waiting else _places(after) or 'none'}",
                _result(before, after, path in conflicts.get(number, []), waiting),
                _compiles(repository, path) if after and not waiting else "",
            )
            out.append(row)
    return "\n".join(out) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _show(repository: Path, name: str) -> bytes | None:
    done = git(repository, "show", name, check=False)
    return None if done.returncode else done.stdout


def _upstream(repository: Path, path: str, file: Lines, number: int) -> tuple[str, str]:
    """How much upstream changed in a file, and the least distance to what the patch inserts."""
    if _show(repository, f"new-base:{path}") is None:
        return "file is gone", ""
    between = ("--no-renames", "old-base", "new-base", "--", path)
    counts = git(repository, "diff", "--numstat", *between).stdout.decode()
    if not counts:
        return "unchanged", ""
    added, removed, _ = counts.split("\t")
    changed = []
    for match in _HUNK.finditer(git(repository, "diff", "--unified=0", *between).stdout):
        count = 1 if match[2] is None else int(match[2])
        # A pure insertion is said to be at the line before it, a removal at its first line.
        begin = int(match[1]) if count == 0 else int(match[1]) - 1
        changed.append((begin, begin + count))
    places = _base_places(file, number)
    nearest = min(max(begin - at, at - end, 0) for at in places for begin, end in changed)
    return f"+{added} -{removed}", str(nearest)


def _base_places(file: Lines, number: int) -> list[int]:
    """Numbers of base lines before each line of a patch."""
    places, count = [], 0
    for _, owner in file:
        count += owner == 0
        if owner == number:
            places.append(count)
    return places


def _places(hunks: list[Hunk]) -> str:
    return ", ".join(str(hunk.after) for hunk in hunks)


def _result(before: list[Hunk], after: list[Hunk], conflict: bool, waiting: bool) -> str:
    if waiting:
        return "conflict, to be resolved" if conflict else "not reached"
    if not after:
        return "dropped"
    if conflict:
        return "conflict"
    return "clean" if _places(before) == _places(after) else "moved"


def _compiles(repository: Path, path: str) -> str:
    try:
        check_compiles({path: (repository / path).read_bytes()})
    except EfaError as error:
        return f"no: {error}"
    return "yes"
