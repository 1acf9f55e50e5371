"""Who owns an emulated cluster, and what the next start may remove.

Each running emulation has a directory with a `lock` file on which it holds an flock for as long as
it lives, and a `claim.json`. The kernel drops the lock however the emulation ends; a directory
whose lock is free belongs to a dead one, and every process that still carries its token is killed.
"""

import contextlib
import fcntl
import ipaddress
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from megatron.efa.emulate import processes
from megatron.efa.errors import EfaError

# RFC 2544's range for benchmarks of network devices: no VPC and no host uses it.
_POOL = IPv4Network("198.18.0.0/15")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


@dataclass(frozen=True)
class Claim:
    """What one running emulation owns; `release` gives it back."""

    name: str
    token: str
    subnet: IPv4Network
    directory: Path
    lock: int

    def release(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self.lock)


def checked_name(name: str) -> str:
    """The name itself; EfaError if it cannot be part of a path and of a token."""
    if _NAME.fullmatch(name) is None:
        raise EfaError(
            f"'{name}' cannot name an emulated cluster: use up to 40 lower-case letters, digits "
            "and inner hyphens"
        )
    return name


def state_root() -> Path:
    """The directory that this user's claims are in, made if need be."""
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        root = Path("/run/megatron-efa")
    elif os.environ.get("XDG_RUNTIME_DIR") and os.access(os.environ["XDG_RUNTIME_DIR"], os.W_OK):
        root = Path(os.environ["XDG_RUNTIME_DIR"]) / "megatron-efa"
    else:
        root = Path(tempfile.gettempdir()) / f"megatron-efa-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    if root.is_symlink() or not root.is_dir() or root.stat().st_uid != os.geteuid():
        raise EfaError(
            f"{root} is not a directory of yours: remove it, emulations keep locks there"
        )
    return root


def claim(name: str, busy: list[str], root: Path | None = None) -> Claim:
    """Remove what dead emulations left, then claim a name and a subnet of its own.

    `busy` are addresses or networks (as `ipaddress` reads them) that the subnet must not overlap.
    Raises EfaError if an emulation of that name is running.
    """
    root = state_root() if root is None else root
    with _exclusively(root):
        living = _sweep(root)
        if name in living:
            raise EfaError(
                f"an emulated cluster named {name} is running (process {living[name]['pid']}): "
                "give this one another --name"
            )
        taken = [ipaddress.ip_network(text, strict=False) for text in busy]
        taken += [IPv4Network(other["subnet"]) for other in living.values()]
        subnet = _free_subnet(taken)
        directory = root / name
        directory.mkdir(mode=0o700)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        token = f"{name}/{os.getpid()}/{processes.start_time(os.getpid())}"
        content = {"pid": os.getpid(), "token": token, "subnet": str(subnet)}
        (directory / "claim.json").write_text(json.dumps(content))
    return Claim(name, token, subnet, directory, lock)


def _free_subnet(taken: list[IPv4Network]) -> IPv4Network:
    for subnet in _POOL.subnets(new_prefix=24):
        if not any(subnet.overlaps(other) for other in taken):
            return subnet
    raise EfaError(f"every /24 of {_POOL} is in use: end some of the emulated clusters")


@contextlib.contextmanager
def _exclusively(root: Path) -> Iterator[None]:
    """Hold the lock under which claims are made and swept."""
    handle = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sweep(root: Path) -> dict[str, dict]:
    """Remove dead emulations' claims and processes; returns the living claims by name."""
    living = {}
    for directory in sorted(path for path in root.iterdir() if path.is_dir()):
        try:
            lock = os.open(directory / "lock", os.O_RDWR)
        except FileNotFoundError:  # died while claiming: it had started nothing yet
            shutil.rmtree(directory, ignore_errors=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            living[directory.name] = json.loads((directory / "claim.json").read_text())
            continue
        finally:
            os.close(lock)
        _remove(directory)
    return living


def _remove(directory: Path) -> None:
    """Kill and remove what the dead emulation of `directory` left."""
    try:
        token = json.loads((directory / "claim.json").read_text())["token"]
    except (FileNotFoundError, ValueError, KeyError):  # died while claiming
        token = None
    if token is not None and (left := processes.kill_tagged(token)):
        raise EfaError(
            f"processes {left} of the dead emulated cluster {directory.name} cannot be killed: "
            "they hang in the kernel, restart the machine or give this one another --name"
        )
    shutil.rmtree(directory, ignore_errors=True)
