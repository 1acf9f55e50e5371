"""The process that keeps one node alive: it makes the node's namespaces and waits.

A node is its processes. The holder forks the first process of a new PID namespace; when that one
ends, the kernel kills everything in the node and frees its network. It ends when the holder does,
and the holder ends when the emulator's end of the lifeline pipe closes, however the emulator died.
Nothing is registered anywhere (no /run/netns, no link in the host's network), so nothing can be
left behind.
"""

import contextlib
import json
import os
import signal
import socket
import sys

from megatron.efa.emulate import kernel

_READY = b"+"


def main() -> None:
    """argv: a JSON object with hostname, hosts (a file or null) and lifeline (an open descriptor).

    Writes one JSON line: {"pid": first process of the node} or {"error": why there is no node}.
    """
    spec = json.loads(sys.argv[1])
    listen, speak = os.pipe()
    try:
        os.unshare(os.CLONE_NEWPID)
    except OSError as error:
        _report({"error": f"making a PID namespace: {error.strerror}"})
        sys.exit(1)
    pid = os.fork()
    if pid == 0:
        os.close(listen)
        _first_process(spec, speak)
    os.close(speak)
    answer = b"".join(iter(lambda: os.read(listen, 4096), b""))
    if answer != _READY:
        _report({"error": answer.decode() or "the first process of the node ended at once"})
        sys.exit(1)
    _report({"pid": pid})
    signal.signal(signal.SIGCHLD, lambda *_: os._exit(1))  # the node is gone: so is its holder
    if os.waitpid(pid, os.WNOHANG) == (0, 0):
        while os.read(spec["lifeline"], 4096):
            pass
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _report(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


def _first_process(spec: dict, speak: int) -> None:
    """Process 1 of the node: sets the node up, then reaps orphans until it is killed."""
    try:
        kernel.die_with_parent()
        _unshare(spec["hostname"], spec["hosts"])
        os.write(speak, _READY)  # fails if the holder died before die_with_parent
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(speak, (error.strerror or str(error)).encode())
        os._exit(1)
    os.close(speak)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(spec["lifeline"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while True:
        signal.pause()


def _unshare(hostname: str, hosts: str | None) -> None:
    try:
        os.unshare(os.CLONE_NEWNET | os.CLONE_NEWUTS | os.CLONE_NEWIPC | os.CLONE_NEWNS)
        socket.sethostname(hostname)
    except OSError as error:
        raise OSError(error.errno, f"making namespaces: {error.strerror}") from error
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    if os.path.isdir("/dev/shm"):  # real nodes share no memory, and what ranks leave goes with them
        kernel.mount("tmpfs", "/dev/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV)
    if hosts is not None and os.path.exists("/etc/hosts"):
        kernel.mount(hosts, "/etc/hosts", None, kernel.MS_BIND)
    # No router or neighbour discovery on the link: the counters count the job.
    with (
        contextlib.suppress(OSError),
        open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w") as file,
    ):
        file.write("1")
