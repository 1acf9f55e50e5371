"""Making files aside: a hidden folder beside the output, which no run leaves behind for good."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_IN_USE = "in-use"


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A new folder beside `target` (in `.NAME.partial-*`, same file system), gone afterwards.

    A lock is held while it is in use: what a run that was killed left beside the same target is
    recognized by its free lock and removed. Where the file system has no locks nothing is. Raises
    OSError.
    """
    prefix = f".{target.name}.partial-"
    target.parent.mkdir(parents=True, exist_ok=True)
    with alone(target.parent) as certain:
        if certain:
            _sweep(target.parent, prefix)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        handle = os.open(scratch / _IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
        _lock(handle)
    try:
        made = scratch / "made"  # not the folder itself: it may be moved away, without the lock
        made.mkdir()
        yield made
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(handle)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Hold the lock of `folder`, so that what two runs move into it cannot mix.

    Gives False where the file system has no locks.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(handle, wait=True)
    finally:
        os.close(handle)


def _sweep(folder: Path, prefix: str) -> None:
    for left in folder.iterdir():
        if left.name.startswith(prefix) and left.is_dir() and not left.is_symlink():
            # A folder without the file was left in the middle of `beside`, for we hold the lock.
            handle = os.open(left / _IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if _lock(handle):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


def _lock(handle: int, wait: bool = False) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # held by another, or (NFS, some FUSE) not to be had for a folder
        return False
    return True
