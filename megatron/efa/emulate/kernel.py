"""The Linux calls that Python does not offer: prctl and mount."""

import ctypes
import os
import signal

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) was refused")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that forked it ends.

    A parent that died before this call is not noticed here: the caller checks that it is still
    there.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can escape."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """mount(2); raises OSError naming the target."""
    kind_bytes = kind.encode() if kind is not None else None
    if _libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mounting {target}: {os.strerror(code)}")
