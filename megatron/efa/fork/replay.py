"""Read the commits that a rebase made back as patches."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork import align, lines
from megatron.efa.fork.git import git, names
from megatron.efa.fork.lines import Lines
from megatron.efa.fork.series import Patch

_MARKERS = (b"<<<<<<< ", b"||||||| ", b">>>>>>> ")


def check_resolution(repository: Path, conflicts: list[str]) -> None:
    """Check what the engineer left in the work tree before it becomes a commit.

    Raises:
        EfaError: a conflict marker is left, a file appears or goes, or an upstream line is changed.
    """
    for path in conflicts:
        file = repository / path
        for number, line in enumerate(_lines_of(file), start=1):
            if line.startswith(_MARKERS):
                raise EfaError(
                    f"{file}:{number} still has a conflict marker: resolve it, then run "
                    "`megatron-efa fork rebase --continue`"
                )
    changed = names(repository, "diff", "--name-status", "--no-renames", "-z", "HEAD")
    untracked = names(repository, "ls-files", "--others", "-z")
    pairs = [*zip(changed[::2], changed[1::2], strict=True), *(("A", path) for path in untracked)]
    for status, path in pairs:
        before = git(repository, "show", f"HEAD:{path}", check=False).stdout
        _inserted(path, status, lines.split(before), _lines_of(repository / path))


def _lines_of(file: Path) -> list[bytes]:
    return lines.split(file.read_bytes()) if file.is_file() else []


def replay(repository: Path, series: list[Patch], base: str) -> dict[int, Patch]:
    """The commits `base`..HEAD as patches, numbered anew, by their number in `series`.

    A patch whose commit is gone or empty (upstream has it now) is left out.

    Raises:
        EfaError: a commit does more than insert lines, or belongs to no patch of `series`.
    """
    files: dict[str, Lines] = {}
    moved: dict[int, Patch] = {}
    for commit, patch in _commits(repository, series, base):
        number = len(moved) + 1
        changed = names(
            repository, "diff-tree", "-r", "-z", "--no-commit-id", "--name-status",
            "--no-renames", commit,
        )  # fmt: skip
        for status, path in zip(changed[::2], changed[1::2], strict=True):
            before = files.get(path)
            if before is None:
                text = git(repository, "show", f"{base}:{path}", check=False).stdout
                before = [(line, 0) for line in lines.split(text)]
            after = lines.split(git(repository, "show", f"{commit}:{path}", check=False).stdout)
            prefer = {hunk.lines for hunk in patch.hunks if hunk.path == path}
            marks = _inserted(path, status, [line for line, _ in before], after, prefer)
            owners = iter([owner for _, owner in before])
            files[path] = [(x, number if mark == align.NEW else next(owners)) for x, mark in marks]
        hunks = [h for path in sorted(files) for h in lines.hunks(path, files[path], number)]
        if hunks:
            moved[patch.number] = replace(patch, number=number, hunks=tuple(hunks))
    return moved


def _commits(repository: Path, series: list[Patch], base: str) -> Iterator[tuple[str, Patch]]:
    log = git(repository, "log", "--reverse", "--format=%H %s", f"{base}..HEAD").stdout.decode()
    last = 0
    for entry in log.splitlines():
        commit, subject = entry.split(" ", 1)
        number = subject.split(" ", 1)[0]
        if not number.isdigit() or not last < int(number) <= len(series):
            raise EfaError(
                f"commit {commit[:10]} ({subject}) in {repository} is none of the series, or out of "
                "order: squash it into that of its patch, then run `megatron-efa fork rebase --continue`"
            )
        last = int(number)
        yield commit, series[last - 1]


def _inserted(
    path: str,
    status: str,
    before: list[bytes],
    after: list[bytes],
    prefer: set[tuple[bytes, ...]] | frozenset[tuple[bytes, ...]] = frozenset(),
) -> Lines:
    """`after` with owner 0 for the lines of `before` and `NEW` for inserted ones."""
    mend = "mend it in the scratch repository, then run `megatron-efa fork rebase --continue`"
    if status not in ("M", "U"):
        word = "removed" if status == "D" else "created"
        raise EfaError(f"{path} is {word} there, but a patch may only insert lines: {mend}")
    try:
        return align.own([(line, 0) for line in before], after, prefer)
    except align.BaseLineLost as lost:
        text = lost.text.decode(errors="replace").strip()
        raise EfaError(
            f"{path}: line {lost.number} before the patch ({text!r}) is changed or gone, but a patch "
            f"may only insert: {mend}"
        ) from None
