"""Read the commits that a rebase made back as patches."""

from collections.abc import Collection, Iterator
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork import align, lines
from megatron.efa.fork.git import git, names
from megatron.efa.fork.lines import Lines
from megatron.efa.fork.series import Patch

_MARKERS = (b"<<<<<<< ", b"||||||| ", b">>>>>>> ")


def check_resolution(repository: Path) -> None:
    """Check what the engineer left in the work tree before it becomes a commit.

    Raises:
        EfaError: a conflict marker is left, a file appears or goes, or an upstream line is changed.
    """
    changed = names(repository, "diff", "--name-only", "--no-renames", "-z", "HEAD")
    for path in sorted({*changed, *names(repository, "ls-files", "--others", "-z")}):
        file = repository / path
        after = lines.split(file.read_bytes()) if file.is_file() else None
        for number, line in enumerate(after or (), start=1):
            if line.startswith(_MARKERS):
                raise EfaError(
                    f"{file}:{number} still has a conflict marker: resolve it, then run "
                    "`megatron-efa fork rebase --continue`"
                )
        _inserted(path, _lines_at(repository, "HEAD", path), after)


def _lines_at(repository: Path, commit: str, path: str) -> list[bytes] | None:
    done = git(repository, "show", f"{commit}:{path}", check=False)
    return None if done.returncode else lines.split(done.stdout)


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
        options = ("-r", "-z", "--no-commit-id", "--name-only", "--no-renames")
        for path in names(repository, "diff-tree", *options, commit):
            before = files.get(path)
            if before is None:
                text = _lines_at(repository, base, path)
                before = None if text is None else [(line, 0) for line in text]
            prefer = {hunk.lines for hunk in patch.hunks if hunk.path == path}
            old = None if before is None else [line for line, _ in before]
            marks = _inserted(path, old, _lines_at(repository, commit, path), prefer)
            owners = iter([owner for _, owner in before or ()])
            files[path] = [(x, number if mark == align.NEW else next(owners)) for x, mark in marks]
        result = lines.rewritten(patch, files, number)
        if result.hunks:
            moved[patch.number] = result
    return moved


def _commits(repository: Path, series: list[Patch], base: str) -> Iterator[tuple[str, Patch]]:
    log = git(repository, "log", "--reverse", "--format=%H %s", f"{base}..HEAD").stdout.decode()
    last = 0
    for entry in log.splitlines():
        commit, subject = entry.split(" ", 1)
        number = subject.split(" ", 1)[0]
        if not number.isdigit() or not last < int(number) <= len(series):
            raise EfaError(
                f"commit {commit[:10]} ({subject}) in {repository} is none of the series, or out "
                "of order: squash it into that of its patch, then run "
                "`megatron-efa fork rebase --continue`"
            )
        last = int(number)
        yield commit, series[last - 1]


def _inserted(
    path: str,
    before: list[bytes] | None,
    after: list[bytes] | None,
    prefer: Collection[tuple[bytes, ...]] = (),
) -> Lines:
    """`after` with owner 0 for the lines of `before` and `NEW` for inserted ones."""
    mend = "mend it in the scratch repository, then run `megatron-efa fork rebase --continue`"
    if before is None and after is None:  # a conflict about a file that is gone upstream too
        return []
    if before is None or after is None:
        word = "removed" if after is None else "created"
        raise EfaError(f"{path} is {word} by the patch, but it may only insert lines: {mend}")
    try:
        return align.own([(line, 0) for line in before], after, prefer)
    except align.BaseLineLost as lost:
        text = lost.text.decode(errors="replace").strip()
        raise EfaError(
            f"{path}: line {lost.number} before the patch ({text!r}) is changed or gone, but a "
            f"patch may only insert: {mend}"
        ) from None
