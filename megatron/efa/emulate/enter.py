"""The process that stands between the emulator and one command on a node.

It enters the node's namespaces (or, without root, only adopts orphans), runs the command as its
child, passes signals on, and ends as the command ended. When the lifeline closes, the command is
killed.
"""

import contextlib
import json
import os
import select
import signal
import sys

from megatron.efa.emulate import kernel, processes

_NAMESPACES = {
    "ipc": os.CLONE_NEWIPC,
    "uts": os.CLONE_NEWUTS,
    "net": os.CLONE_NEWNET,
    "pid": os.CLONE_NEWPID,
    "mnt": os.CLONE_NEWNS,
}
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """argv: JSON with pid (of the node's first process, or null), cwd and lifeline; command."""
    spec, command = json.loads(sys.argv[1]), sys.argv[2:]
    os.set_inheritable(spec["lifeline"], False)
    if spec["pid"] is None:
        kernel.adopt_orphans()
    else:
        try:
            join(spec["pid"])
        except OSError as error:
            print(f"the node is gone: {error}", file=sys.stderr)
            sys.exit(125)
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until they can be passed on
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _become(command, spec["cwd"], parent)
    for number in _FORWARDED:
        signal.signal(number, lambda received, _: _pass_on(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    status = _wait(child, spec["lifeline"], woken)
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    if spec["pid"] is None:
        processes.kill_descendants()
    processes.resemble(status)


def _wait(child: int, lifeline: int, woken: int) -> int:
    """Wait status of the command; kills it when the emulator has gone or closes the cluster.

    (No thread: a process that has entered another PID namespace cannot start one.)
    """
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            return status
        ready, _, _ = select.select([lifeline, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        elif not os.read(lifeline, 4096):
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]


def join(pid: int) -> None:
    """Enter all namespaces of a process; the PID namespace holds for children only."""
    handles = [
        (os.open(f"/proc/{pid}/ns/{n}", os.O_RDONLY), flag) for n, flag in _NAMESPACES.items()
    ]
    for handle, flag in handles:
        os.setns(handle, flag)
        os.close(handle)


def _become(command: list[str], cwd: str, parent: int) -> None:
    kernel.die_with_parent()
    if os.getppid() not in (parent, 0):  # 0: the parent is outside this PID namespace
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    try:
        os.chdir(cwd)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]} in {cwd}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _pass_on(child: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(child, number)
