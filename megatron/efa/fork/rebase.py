"""Move the series to another release by a real three-way merge.

Without context a patch applies anywhere without complaint, so it is never applied to another
base. Instead a scratch repository gets the old base, one commit a patch, and the new base beside
them, and `git rebase` moves the commits over. Only what comes out of it is written as patches
again; until then neither `patches/` nor the tree is touched.
"""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron.efa.errors import EfaError
from megatron.efa.fork import lines, report, state
from megatron.efa.fork.export import store
from megatron.efa.fork.git import git, names
from megatron.efa.fork.layout import COMPILED, Layout, Pin
from megatron.efa.fork.replay import check_resolution, replay
from megatron.efa.fork.series import Patch, digest, load
from megatron.efa.fork.state import Kind, refusal_of_edits
from megatron.efa.fork.sync import check_compiles, locked, sync
from megatron.efa.fork.wheel import Base, find, obtain

Moved = dict[int, Patch]
OLD, NEW, SERIES = "old-base", "new-base", "series"


@dataclass
class Progress:
    """What a rebase remembers between its commands."""

    version: str
    sha256: str
    conflicts: dict[str, list[str]] = field(default_factory=dict)  # patch number -> paths
    finishing: bool = False  # patches/ is being rewritten


@dataclass(frozen=True)
class Scratch:
    """Paths of a rebase under way."""

    layout: Layout

    @property
    def directory(self) -> Path:
        return self.layout.state / "rebase"

    @property
    def repository(self) -> Path:
        return self.directory / "repository"

    @property
    def series(self) -> list[Patch]:
        """The series as it was at the start."""
        return load(self.directory / "patches")

    @property
    def report(self) -> Path:
        return self.layout.state / "rebase-report.md"

    def read(self) -> Progress:
        try:
            return Progress(**json.loads((self.directory / "progress.json").read_text()))
        except FileNotFoundError:
            raise EfaError(
                "no rebase is under way: start one by `megatron-efa fork rebase --to VERSION`"
            ) from None

    def write(self, progress: Progress) -> None:
        aside = self.directory / "progress.new"
        aside.write_text(json.dumps(vars(progress)))
        aside.replace(self.directory / "progress.json")


def start(layout: Layout, version: str, *, directory: Path | None = None) -> str:
    """Move the series to `version`, then the tree; return a sentence on the tree.

    If the pin knows no content hash of that version, the one computed is printed, and recorded in
    `patches/upstream.toml` once the rebase has ended: from then on it is checked like any other.

    Args:
        directory: wheels to take; a release that is not there comes from the cache or the index.

    Raises:
        EfaError: a conflict (then resolve it and `go_on`), or the rebase cannot start.
    """
    try:
        Version(version)
    except InvalidVersion:
        raise EfaError(f"--to {version} is no version: give one such as 0.19.2") from None
    scratch = Scratch(layout)
    with locked(layout):
        if scratch.directory.exists():
            raise EfaError(
                f"a rebase to {scratch.read().version} is under way: go on by `megatron-efa fork "
                "rebase --continue` or give it up by `--abort`"
            )
        pin, series = layout.pin(), load(layout.patches)
        tree = state.inspect(layout, digest(pin.sha256, series))
        if tree.kind is Kind.DIRTY:
            raise refusal_of_edits(layout, tree)
        if version == pin.version:
            raise EfaError(f"the series is on {version} already: give `--to` another version")
        old, new = (_obtain(pin, wanted, directory) for wanted in (pin.version, version))
        if version not in pin.hashes:
            print(f"{pin.distribution} {version} is new here, its content hash is {new.sha256}")
        _prepare(scratch, old, new, series)
        _step(scratch, "rebase", "--empty=keep", "--onto", NEW, OLD, SERIES)
        print(_finish(scratch))
    return sync(layout, directory=_holding(layout.pin(), version, directory))


def go_on(layout: Layout) -> str:
    """Go on after conflicts are resolved; returns and raises as `start`."""
    scratch = Scratch(layout)
    with locked(layout):
        scratch.read()  # is one under way?
        repository = scratch.repository
        if (repository / ".git" / "rebase-merge").exists():
            check_resolution(repository)
            git(repository, "add", "--all", "--force")
            _step(scratch, "rebase", "--continue")
        print(_finish(scratch))
    return sync(layout)


def abort(layout: Layout) -> str:
    """Forget a rebase under way."""
    scratch = Scratch(layout)
    with locked(layout):
        progress = scratch.read()
        if progress.finishing:
            raise EfaError(
                "patches/ is half rewritten already: finish by `megatron-efa fork rebase "
                f"--continue`, or restore patches/ with git and delete {scratch.directory}"
            )
        _remove(scratch)
    return f"the rebase to {progress.version} is forgotten; patches/ and megatron/ are as they were"


def _obtain(pin: Pin, version: str, directory: Path | None) -> Base:
    return obtain(pin, version, directory=_holding(pin, version, directory))


def _holding(pin: Pin, version: str, directory: Path | None) -> Path | None:
    return directory if directory and find(pin, version, directory) else None


def _prepare(scratch: Scratch, old: Base, new: Base, series: list[Patch]) -> None:
    """Make the scratch repository aside and rename it, so that a killed start leaves none."""
    for leftover in scratch.layout.state.glob("rebase-new-*"):
        shutil.rmtree(leftover)
    aside = Path(tempfile.mkdtemp(dir=scratch.layout.state, prefix="rebase-new-"))
    repository = aside / "repository"
    repository.mkdir()
    (aside / "patches").mkdir()
    store(aside / "patches", series)
    git(repository, "init", "--quiet", "--initial-branch", OLD)
    _commit(repository, old.files, f"{old.version}\n")
    git(repository, "switch", "--quiet", "--create", SERIES)
    for patch in series:
        files = lines.apply(series[: patch.number], old.files.get)
        _commit(
            repository,
            {path: lines.join(files[path]) for path in patch.paths},
            f"{patch.number:04d} {patch.title}\n\n{patch.header}",
        )
    git(repository, "switch", "--quiet", "--create", NEW, OLD)
    shutil.rmtree(repository / "megatron")
    _commit(repository, new.files, f"{new.version}\n")
    (aside / "progress.json").write_text(json.dumps(vars(Progress(new.version, new.sha256))))
    os.rename(aside, scratch.directory)


def _commit(repository: Path, files: dict[str, bytes], message: str) -> None:
    for path, data in files.items():
        if not path.endswith(COMPILED):
            (repository / path).parent.mkdir(parents=True, exist_ok=True)
            (repository / path).write_bytes(data)
    git(repository, "add", "--all", "--force")
    git(repository, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "-m", message)


def _step(scratch: Scratch, *command: str) -> None:
    """Let git go on; at a conflict write down which patch and files it is in, and raise."""
    done = git(scratch.repository, *command, check=False)
    if done.returncode == 0:
        return
    paths = names(scratch.repository, "diff", "--name-only", "--diff-filter=U", "-z")
    progress = scratch.read()
    if not paths:
        reason = done.stderr.decode(errors="replace").strip().splitlines()
        raise EfaError(
            f"git cannot go on in {scratch.repository} ({' '.join(reason[-1:]) or 'no reason'}): "
            "mend it there and run `megatron-efa fork rebase --continue`, or `--abort`"
        )
    subject = git(scratch.repository, "log", "-1", "--format=%s", "REBASE_HEAD").stdout.decode()
    number, title = subject.strip().split(" ", 1)
    progress.conflicts[number] = paths
    scratch.write(progress)
    _report(scratch, progress, replay(scratch.repository, scratch.series, NEW), stopped=number)
    raise EfaError(
        f"patches/{number}-{title}.patch conflicts with {progress.version} in "
        f"{', '.join(str(scratch.repository / path) for path in paths)}: resolve it there, then "
        "run `megatron-efa fork rebase --continue` (or `--abort`)"
    )


def _report(scratch: Scratch, progress: Progress, moved: Moved, stopped: str = "") -> None:
    repository, series = scratch.repository, scratch.series
    text = report.render(repository, series, moved, progress.version, progress.conflicts, stopped)
    aside = scratch.report.with_suffix(".new")
    aside.write_text(text)
    aside.replace(scratch.report)


def _finish(scratch: Scratch) -> str:
    layout, progress = scratch.layout, scratch.read()
    pin, old = layout.pin(), scratch.series
    if not progress.finishing and load(layout.patches) != old:
        raise EfaError(
            f"{layout.patches} has changed since the rebase began: restore it with git, or start "
            "again after `megatron-efa fork rebase --abort`"
        )
    moved = replay(scratch.repository, old, NEW)
    _report(scratch, progress, moved)
    try:
        check_compiles(
            {
                path: (scratch.repository / path).read_bytes()
                for patch in moved.values()
                for path in patch.paths
            }
        )
    except EfaError as error:
        raise EfaError(
            f"{error}, by commits in {scratch.repository} (`git rebase --interactive {NEW}`), then "
            "run `megatron-efa fork rebase --continue`"
        ) from None
    progress.finishing = True
    scratch.write(progress)
    store(layout.patches, moved.values())
    hashes = dict(sorted({**pin.hashes, progress.version: progress.sha256}.items()))
    aside = layout.pin_file.with_suffix(".new")
    aside.write_text(Pin(pin.distribution, progress.version, hashes).render())
    aside.replace(layout.pin_file)
    _remove(scratch)
    return (
        f"moved {len(moved)} of {len(old)} patches to {pin.distribution} {progress.version}, "
        f"read {scratch.report}"
    )


def _remove(scratch: Scratch) -> None:
    gone = scratch.directory.with_name("rebase-new-gone")
    os.rename(scratch.directory, gone)
    shutil.rmtree(gone)
