"""What a rebase did, for the engineer who has to judge it.

A clean merge says where lines went, not that they mean the same there. So for each patch and file
the report says how much of it upstream changed, and whether insertions still have their neighbours.
"""

from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork import lines
from megatron.efa.fork.git import git
from megatron.efa.fork.series import Hunk, Patch
from megatron.efa.fork.sync import check_compiles

_LEGEND = """\
clean: same line, same neighbours. moved: other line, same neighbours. neighbours changed: merged
by git without a conflict, but beside other lines: read it. conflict: resolved by hand. dropped:
nothing was left to insert. Upstream: lines added and removed in that file between the releases.
"""


def render(
    repository: Path,
    series: list[Patch],
    moved: dict[int, Patch],
    version: str,
    conflicts: dict[str, list[str]],
    stopped: str = "",
) -> str:
    """The report in Markdown; `conflicts`: paths by patch number, `stopped`: the one that waits."""
    old_version = git(repository, "log", "-1", "--format=%s", "old-base").stdout.decode().strip()
    out = [f"# The series from {old_version} to {version}", "", _LEGEND]
    if stopped:
        out += [f"Not finished: patch {stopped} waits for its conflicts to be resolved.", ""]
    out += ["| patch | file | upstream | after line | result | compiles |", f"|{'---|' * 6}"]
    for patch in _with_neighbours(repository, series):
        for path in patch.paths:
            before = [hunk for hunk in patch.hunks if hunk.path == path]
            now = moved.get(patch.number)
            after = [hunk for hunk in now.hunks if hunk.path == path] if now else []
            number = f"{patch.number:04d}"
            conflict = path in conflicts.get(number, [])
            waiting = bool(stopped) and number >= stopped
            cells = [
                f"{number} {patch.title}",
                path,
                _upstream(repository, path),
                f"{_places(before)} -> {'?' if waiting else _places(after) or 'none'}",
                _result(before, after, conflict, waiting),
                "" if waiting else _compiles(repository, path),
            ]
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def _with_neighbours(repository: Path, series: list[Patch]) -> list[Patch]:
    """The series on its old base, each hunk with the digest of its neighbours."""

    def read(path: str) -> bytes | None:
        done = git(repository, "show", f"old-base:{path}", check=False)
        return None if done.returncode else done.stdout

    files = lines.apply(series, read)
    return [
        Patch(
            patch.number,
            patch.title,
            patch.header,
            tuple(h for path in patch.paths for h in lines.hunks(path, files[path], patch.number)),
        )
        for patch in series
    ]


def _upstream(repository: Path, path: str) -> str:
    out = git(repository, "diff", "--numstat", "--no-renames", "old-base", "new-base", "--", path)
    if not out.stdout:
        return "unchanged"
    added, removed, _ = out.stdout.decode().split("\t")
    if git(repository, "cat-file", "-e", f"new-base:{path}", check=False).returncode:
        return "file is gone"
    return f"+{added} -{removed}"


def _places(hunks: list[Hunk]) -> str:
    return ", ".join(str(hunk.after) for hunk in hunks)


def _result(before: list[Hunk], after: list[Hunk], conflict: bool, waiting: bool) -> str:
    if waiting:
        return "conflict, to be resolved" if conflict else "not reached"
    if not after:
        return "dropped"
    if conflict:
        return "conflict"
    if [hunk.beside for hunk in before] != [hunk.beside for hunk in after]:
        return "neighbours changed"
    return "clean" if _places(before) == _places(after) else "moved"


def _compiles(repository: Path, path: str) -> str:
    try:
        check_compiles({path: (repository / path).read_bytes()})
    except (EfaError, FileNotFoundError) as error:
        return f"no: {error}"
    return "yes"
