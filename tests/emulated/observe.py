"""What an emulation has on this machine, what is still there, and whether a link held its rate.

A network namespace, and the links in it, exist as long as a process is in it, a descriptor is open
on it, or a mount holds it: these are what is looked for.
"""

import contextlib
import os
import time
from pathlib import Path

from megatron.efa.emulate import claims, processes


def pids(name):
    """Processes that belong to the emulation of a name, whoever its owner was."""
    needle = f"{processes.TAG}={name}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def namespaces(name):
    """Network namespaces other than the host's in which processes of the emulation are."""
    found = set()
    for pid in pids(name):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found - {os.readlink("/proc/self/ns/net")}


def _alive(namespaces):
    held = {line.split()[3] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                held.add(os.readlink(entry / "ns/net"))
                held.update(os.readlink(link) for link in (entry / "fd").iterdir())
    return namespaces & held


def wait_until_gone(name, namespaces, seconds=5.0):
    """Assert that no process and none of the namespaces is left; returns how long that took."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        if not pids(name) and not _alive(namespaces):
            return time.monotonic() - start
        time.sleep(0.05)
    raise AssertionError(f"{name} left processes {pids(name)}, namespaces {_alive(namespaces)}")


def claimed(name):
    """The directory of a claim of that name, whether or not it exists."""
    return claims.state_root() / name


def host_links():
    """Names of the links in the host's own network namespace."""
    return {path.name for path in Path("/sys/class/net").iterdir()}


def at_rate(measured, asked):
    """Whether a link held its rate: never above it, and not far below on a machine that is busy."""
    return 0.4 * asked < measured < 1.08 * asked
