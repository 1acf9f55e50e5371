"""Lay base + series out under `megatron/`, whole or not at all.

The new tree is made complete in `megatron/.fork/`, and renaming it to `ready` is the point of no
return. From there on only renames are left: for each part the old one goes out of the way and the
new one in. Killed anywhere, the next start finds `ready` and does the renames that are left.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork import lines, state
from megatron.efa.fork.layout import PARTS, Layout, content_hash
from megatron.efa.fork.series import Patch, digest, load
from megatron.efa.fork.state import Kind, Tree, refusal_of_edits
from megatron.efa.fork.wheel import Base, obtain


def sync(
    layout: Layout,
    *,
    wheel: Path | None = None,
    directory: Path | None = None,
    force: bool = False,
) -> str:
    """Make the tree base + series and return a sentence on what was done.

    Args:
        wheel, directory: where the release comes from, as in `wheel.obtain`.
        force: replace a tree with edits; edited files are kept under `megatron/.fork/discarded`.

    Raises:
        EfaError: the release cannot be had, a patch does not apply or compile, or the tree has
            edits. The tree is then as it was.
    """
    with locked(layout):
        recovered = _swap(layout) if state.ready_path(layout).exists() else False
        pin, series = layout.pin(), load(layout.patches)
        wanted = digest(pin.sha256, series)
        tree = state.inspect(layout, wanted)
        if tree.kind is Kind.CLEAN and not recovered:
            return (
                f"nothing to do: megatron/ is {pin.distribution} {pin.version} + {_count(series)}"
            )
        if tree.kind is not Kind.CLEAN:
            _refuse_loss(layout, tree, force)
            base = obtain(pin, pin.version, wheel=wheel, directory=directory)
            _build(layout, base, series, wanted)
            _swap(layout)
        first = "finished the sync that was interrupted; " if recovered else ""
        return f"{first}megatron/ is now {pin.distribution} {pin.version} + {_count(series)}"


def _count(series: list[Patch]) -> str:
    return f"{len(series)} patch" if len(series) == 1 else f"{len(series)} patches"


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Hold the checkout's fork for one command; the lock goes with the process that holds it."""
    layout.state.mkdir(parents=True, exist_ok=True)
    with (layout.state / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EfaError(
                f"another `megatron-efa fork` is at work in {layout.root}: wait until it has ended"
            ) from None
        yield


def _refuse_loss(layout: Layout, tree: Tree, force: bool) -> None:
    """Nobody's edits go without a word; a deleted file is nothing to lose, and is just put back."""
    if tree.kind is Kind.DIRTY and (tree.changed or tree.added):
        if not force:
            raise refusal_of_edits(layout, tree)
        keep = layout.state / "discarded"
        shutil.rmtree(keep, ignore_errors=True)
        for path in tree.changed + tree.added:
            (keep / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(layout.root / path, keep / path, follow_symlinks=False)
    if tree.kind is Kind.UNKNOWN and not force and not _is_pristine(layout):
        raise EfaError(
            f"{layout.namespace / PARTS[0]} was not laid out by `megatron-efa fork sync`: move it "
            "away, or replace it by `megatron-efa fork sync --force`"
        )


def _is_pristine(layout: Layout) -> bool:
    """Whether the tree is an unpatched release that can be fetched again at any time."""
    hashes = {
        path: bytes.fromhex(state.hash_file(layout.root / path))
        for path in state.survey(layout.namespace)
    }
    return content_hash(hashes) in layout.pin().hashes.values()


def _build(layout: Layout, base: Base, series: list[Patch], wanted: str) -> None:
    """Write the tree and its manifest aside, then rename them to `ready`."""
    for leftover in layout.state.glob("new-*"):
        shutil.rmtree(leftover)
    patched = {path: lines.join(file) for path, file in lines.apply(series, base.files.get).items()}
    check_compiles(patched)
    aside = Path(tempfile.mkdtemp(dir=layout.state, prefix="new-"))
    before = time.time_ns() - 2_000_000_000  # see state.py
    for path, data in (base.files | patched).items():
        file = aside.joinpath(*path.split("/")[1:])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        os.utime(file, ns=(before, before))
    state.record(aside, base.version, wanted).write(aside / "manifest.json")
    os.rename(aside, state.ready_path(layout))


def check_compiles(patched: dict[str, bytes]) -> None:
    """Raise an EfaError naming the first patched Python file that is no valid Python."""
    for path, data in patched.items():
        if path.endswith(".py"):
            try:
                compile(data, path, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise EfaError(
                    f"{path}:{error.lineno} does not compile once the series is applied "
                    f"({error.msg}): mend what is inserted there"
                ) from None


def _swap(layout: Layout) -> bool:
    """Do the renames that are left and clear up; the manifest comes last. Returns True."""
    ready = state.ready_path(layout)
    for part in PARTS:
        if (ready / part).exists():
            place = layout.namespace / part
            if place.exists():
                old = tempfile.mkdtemp(dir=layout.state, prefix="old-")
                os.rename(place, Path(old) / part)
            os.rename(ready / part, place)
    if (ready / "manifest.json").exists():
        os.rename(ready / "manifest.json", state.manifest_path(layout))
    for old in layout.state.glob("old-*"):
        shutil.rmtree(old)
    ready.rmdir()
    return True
