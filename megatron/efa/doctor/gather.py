"""`Meeting`: processes of a job exchange values over plain TCP, and nobody waits for the missing.

Rank 0, the head, listens; the others connect and stay connected. `exchange` is an all-gather with
a time limit: whoever has not sent by then, or whose connection broke, is absent from there on, and
all others learn it. No PyTorch: a meeting works where nothing else does.
"""

import contextlib
import json
import resource
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.efa.cluster.discover.slurm import expand
from megatron.efa.errors import EfaError

_RETRY_S = 0.2
_SLACK_S = 5.0
"""For what takes no time: to send or receive a message that is there."""
_LONGEST = 1 << 26


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job, by its launcher's variables."""

    rank: int
    world: int
    local: int = 0
    locals: int = 1
    head: str = "127.0.0.1"
    port: int = 29501
    job: str = ""

    @property
    def node(self) -> int:
        return self.rank // self.locals

    @property
    def nodes(self) -> int:
        return -(-self.world // self.locals)


def place(environ: Mapping[str, str]) -> Place | None:
    """torchrun's, Slurm's (in a step of srun) or Kubeflow's place; None outside a job.

    The port is the one above torchrun's, which torchrun holds itself; 29501 where none is told.
    """
    try:
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return _place(environ, "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER")
        if "PET_NODE_RANK" in environ:
            return _place(environ, "PET_NODE_RANK", "PET_NNODES", "", "PET_MASTER")
        if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            tasks, nodes = (int(environ[f"SLURM_STEP_NUM_{what}"]) for what in ("TASKS", "NODES"))
            hosts = expand(environ.get("SLURM_STEP_NODELIST", environ["SLURM_JOB_NODELIST"]))
            return Place(
                int(environ["SLURM_PROCID"]), tasks, int(environ["SLURM_LOCALID"]), tasks // nodes,
                environ.get("MASTER_ADDR", hosts[0]), int(environ.get("MASTER_PORT", "29500")) + 1,
                environ.get("SLURM_JOB_ID", ""),
            )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise EfaError(
            f"the launcher's variables do not tell this process's place: {error}"
        ) from error
    return None


def _place(environ: Mapping[str, str], rank: str, world: str, locals_: str,
           master: str) -> Place:  # fmt: skip
    number, each = int(environ[rank]), int(environ.get(locals_, "1"))
    return Place(
        number,
        int(environ[world]),
        number % each,
        each,
        environ.get(f"{master}_ADDR", "127.0.0.1"),
        int(environ.get(f"{master}_PORT", "29500")) + 1,
        environ.get("TORCHELASTIC_RUN_ID", ""),
    )


class HeadLost(EfaError):
    """The head cannot be reached, or ended."""


class Meeting:
    """All processes of a job that answered; a context manager.

    `names` are the hosts' names by rank, `addresses` those at which they are reached.
    """

    def __init__(self, here: Place, name: str, wait_s: float) -> None:
        self.here = here
        self.names: dict[int, str] = {}
        self.addresses: dict[int, str] = {}
        self.present: list[int] = []
        self._peers: dict[int, socket.socket] = {}
        self._head: socket.socket | None = None
        if here.rank == 0:
            self._gather(name, wait_s)
        else:
            self._join(name, wait_s)

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        for peer in (*self._peers.values(), *filter(None, [self._head])):
            peer.close()

    @property
    def missing(self) -> list[int]:
        """Ranks that are absent."""
        return [rank for rank in range(self.here.world) if rank not in self.present]

    def nodes(self) -> dict[int, list[int]]:
        """Ranks that are present, by the index of their node."""
        found: dict[int, list[int]] = {}
        for rank in self.present:
            found.setdefault(rank // self.here.locals, []).append(rank)
        return found

    def exchange(self, value: Any, seconds: float) -> dict[int, Any]:
        """What each rank that is present gave, by rank; JSON's kinds of values.

        `seconds` is what the slowest, the head too, may take since the last one. Raises HeadLost.
        """
        if self.here.rank:
            return self._send(value, seconds)
        return self._collect(value, seconds, share=True)

    def gather(self, value: Any, seconds: float) -> dict[int, Any]:
        """As `exchange`, but only the head gets the values; the others get none."""
        if self.here.rank:
            return self._send(value, seconds)
        return self._collect(value, seconds, share=False)

    def _gather(self, name: str, wait_s: float) -> None:
        end = time.monotonic() + wait_s
        _raise_limit()
        try:
            listener = socket.create_server(("", self.here.port), backlog=self.here.world)
        except OSError as error:
            raise EfaError(
                f"rank 0 cannot listen on port {self.here.port}: {error.strerror}: give all nodes "
                "another one with --port"
            ) from error
        self.names[0], self.addresses[0] = name, self.here.head
        with listener:
            while len(self._peers) < self.here.world - 1:
                left = end - time.monotonic()
                if left <= 0:
                    break
                listener.settimeout(left)
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    break
                peer.settimeout(min(_SLACK_S, max(left, 0.1)))
                with contextlib.suppress(OSError, ValueError, KeyError):
                    said = _receive(peer)
                    rank = int(said["rank"])
                    if said["job"] == self.here.job and 0 < rank < self.here.world:
                        self._peers[rank] = peer
                        self.names[rank], self.addresses[rank] = said["name"], said["address"]
                        if not (own := peer.getsockname()[0]).startswith("127."):
                            self.addresses[0] = own
                        continue
                peer.close()
        self.present = sorted([0, *self._peers])
        self._tell({"names": self.names, "addresses": self.addresses, "present": self.present})

    def _join(self, name: str, wait_s: float) -> None:
        end, reason = time.monotonic() + wait_s, "it was not tried"
        while self._head is None:
            left = end - time.monotonic()
            if left <= 0:
                raise HeadLost(
                    f"rank 0 did not answer at {self.here.head} port {self.here.port} within "
                    f"{wait_s:.0f} s ({reason}): see that it runs and that the port is open"
                )
            try:
                address = (self.here.head, self.here.port)
                head = socket.create_connection(address, timeout=min(left, _SLACK_S))
                if head.getsockname() == head.getpeername():  # Linux joined it to itself
                    head.close()
                    raise ConnectionRefusedError("it does not listen yet")
                self._head = head
            except OSError as error:
                reason = error.strerror or str(error)
                time.sleep(min(_RETRY_S, max(end - time.monotonic(), 0)))
        own = self._head.getsockname()[0]
        said = {"rank": self.here.rank, "name": name, "job": self.here.job, "address": own}
        try:
            self._head.sendall(_framed(said))
            self._head.settimeout(max(end - time.monotonic(), 0) + _SLACK_S)
            told = _receive(self._head)
        except (OSError, ValueError) as error:
            raise HeadLost(f"rank 0 went on without rank {self.here.rank} ({error})") from error
        self.names = {int(rank): name for rank, name in told["names"].items()}
        self.addresses = {int(rank): a for rank, a in told["addresses"].items()}
        self.present = told["present"]

    def _collect(self, value: Any, seconds: float, share: bool) -> dict[int, Any]:
        end = time.monotonic() + seconds
        values = {0: value}
        with selectors.DefaultSelector() as waiting:
            for rank, peer in self._peers.items():
                waiting.register(peer, selectors.EVENT_READ, rank)
            while waiting.get_map() and (left := end - time.monotonic()) > 0:
                for key, _ in waiting.select(left):
                    waiting.unregister(key.fileobj)
                    with contextlib.suppress(OSError, ValueError):
                        key.fileobj.settimeout(_SLACK_S)
                        values[key.data] = _receive(key.fileobj)
        for rank in [rank for rank in self._peers if rank not in values]:
            self._peers.pop(rank).close()
        self.present = sorted(values)
        self._tell({"values": values if share else {}, "present": self.present})
        return dict(sorted(values.items()))

    def _send(self, value: Any, seconds: float) -> dict[int, Any]:
        try:
            # The head may be late by as much as anybody, and then waits for others as long again.
            self._head.settimeout(2 * seconds + _SLACK_S)
            self._head.sendall(_framed(value))
            told = _receive(self._head)
        except (OSError, ValueError) as error:
            raise HeadLost(
                f"rank 0 ended or went on without rank {self.here.rank} ({error})"
            ) from error
        self.present = told["present"]
        return dict(sorted((int(rank), given) for rank, given in told["values"].items()))

    def _tell(self, value: Any) -> None:
        """Send to all; whoever does not take it is found absent at the next exchange."""
        text = _framed(value)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.settimeout(_SLACK_S)
                peer.sendall(text)


def _framed(value: Any) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("!I", len(text)) + text


def _raise_limit() -> None:
    """Let the head hold a connection of every rank: 1024 files, the usual limit, are too few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _receive(peer: socket.socket) -> Any:
    (size,) = struct.unpack("!I", _exactly(peer, 4))
    if size > _LONGEST:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_exactly(peer, size))


def _exactly(peer: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        more = peer.recv(size - len(got))
        if not more:
            raise ConnectionResetError("the connection ended")
        got += more
    return bytes(got)
