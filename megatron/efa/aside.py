"""Making files aside: a hidden folder beside the output, which no run leaves behind for good."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
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
def alone(folder: Path, patience_s: float = 60.0) -> Iterator[bool]:
    """Hold the lock of `folder`, so that what two runs move into it cannot mix.

    Gives False where the file system has no locks. Raises TimeoutError (an OSError) if another
    process holds the lock for longer than `patience_s` seconds: it is held for renames only.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _wait_for_lock(handle, folder, patience_s)
    finally:
        os.close(handle)


def _sweep(folder: Path, prefix: str) -> None:
    for left in folder.iterdir():
        if left.name.startswith(prefix) and left.is_dir() and not left.is_symlink():
            # A folder without the file was left in the middle of `beside`, for we hold the lock.
            handle = os.open(left / _IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if _lock(handle) is None:
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)


def _wait_for_lock(handle: int, folder: Path, patience_s: float) -> bool:
    # Polled, since a signal that reaches another thread would not end a blocking call.
    end = time.monotonic() + patience_s
    while (failure := _lock(handle)) is not None:
        if failure.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if time.monotonic() > end:
            reason = f"another process has held its lock for {patience_s:.0f} s"
            raise TimeoutError(errno.ETIMEDOUT, reason, str(folder))
        time.sleep(0.05)
    return True


def _lock(handle: int) -> OSError | None:
    """Take the lock if it is free; else why not: held, or (NFS, some FUSE) not to be had."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failure:
        return failure
    return None
