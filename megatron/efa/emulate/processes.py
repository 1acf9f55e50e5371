"""Processes as /proc shows them, and how our own helper processes are started."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

TAG = "MEGATRON_EFA_EMULATION"
"""Environment variable in every process of an emulation; its value is the owner's token."""

_ROOT = str(Path(__file__).resolve().parents[3])


def helper_command(module: str) -> list[str]:
    """The command line that runs `main()` of `megatron.efa.emulate.<module>` in a new interpreter.

    Neither the working directory nor PYTHONPATH decides which code runs, and neither is changed for
    the commands that the helper starts.
    """
    code = (
        f"import sys; sys.path.insert(0, {_ROOT!r}); "
        f"from megatron.efa.emulate.{module} import main; main()"
    )
    return [sys.executable, "-P", "-c", code]


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat after the command name (state first), or None if there is no PID."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def start_time(pid: int) -> int:
    """Clock ticks from boot to the start of a process: with the pid it names one process."""
    fields = stat_fields(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return int(fields[19])


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def children(parent: int) -> list[int]:
    """Pids of the direct children of a process."""
    found = []
    for pid in _all_pids():
        fields = stat_fields(pid)
        if fields is not None and int(fields[1]) == parent:
            found.append(pid)
    return found


def tagged(token: str) -> list[int]:
    """Pids of all living processes that belong to the emulation whose owner's token is given."""
    needle = f"{TAG}={token}".encode()
    found = []
    for pid in _all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # gone by now, or another user's
            continue
        if needle in environment:
            found.append(pid)
    return found


def kill_tagged(token: str, patience_s: float = 5.0) -> list[int]:
    """SIGKILL what an emulation left, also as it forks; returns pids that outlived `patience_s`."""
    deadline = time.monotonic() + patience_s
    while left := [pid for pid in tagged(token) if pid != os.getpid()]:
        if time.monotonic() > deadline:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return []


def kill_descendants() -> None:
    """SIGKILL and reap every descendant; the caller has called `kernel.adopt_orphans`."""
    while True:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def resemble(status: int) -> None:
    """End this process the way a child with wait status `status` ended (never returns)."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.waitstatus_to_exitcode(status))
