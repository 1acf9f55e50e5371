"""What one node sees of another with plain sockets: does it answer, how soon, what gets lost, MTU.

The MTU is found with datagrams that may not be fragmented (DF): the largest that is answered.
Answers are short, so that a result is about one direction.
"""

import contextlib
import socket
import statistics
import struct
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

PINGS = 20
BURST = 64
SIZE = 1200
"""Bytes of each datagram of the burst: below every MTU."""
_SIZES = (9001, 8500, 1500, 1400)
"""IP packets that are tried besides the route's own MTU."""
_HEADERS = 28  # IPv4 and UDP
_CONNECT_S = 3.0
_ANSWER_S = 0.3
_TRIES = 3
_IP_MTU, _IP_MTU_DISCOVER, _PROBE = 14, 10, 3  # linux/in.h; Python does not name them all


@dataclass(frozen=True)
class Seen:
    """Of one direction: what a node saw of its peer."""

    reached: bool
    reason: str = ""
    """Why not."""
    milliseconds: float | None = None
    """Median round trip of a small datagram."""
    lost: int = 0
    """Of a burst of `BURST` datagrams."""
    route_mtu: int | None = None
    """What this node's route says."""
    mtu: int | None = None
    """The largest packet that arrived; None if none did."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Echo:
    """Answers peers on a TCP and a UDP port of its own until closed; a context manager."""

    def __init__(self, address: str) -> None:
        self._closed = False
        self._tcp = socket.create_server((address, 0), backlog=64)
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind((address, 0))
        self.ports = (self._tcp.getsockname()[1], self._udp.getsockname()[1])
        for work in (self._accept, self._answer):
            threading.Thread(target=work, daemon=True).start()

    def __enter__(self) -> "Echo":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for own in (self._tcp, self._udp):
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
            own.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._tcp.accept()[0].close()

    def _answer(self) -> None:
        while True:
            try:
                data, peer = self._udp.recvfrom(65536)
                if peer is None:  # shut down
                    return
                self._udp.sendto(data[:8], peer)
            except OSError:
                if self._closed:
                    return


def look(own: str, peer: str, ports: tuple[int, int]) -> Seen:
    """What this node, at address `own`, sees of the Echo at `peer`. Takes seconds at most."""
    try:
        socket.create_connection((peer, ports[0]), _CONNECT_S, (own, 0)).close()
    except OSError as error:
        return Seen(False, error.strerror or str(error))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as wire:
        wire.bind((own, 0))
        wire.connect((peer, ports[1]))
        wire.settimeout(_ANSWER_S)
        if all(_ping(wire, i, 64) is None for i in range(_TRIES)):
            return Seen(True, "no datagram was answered")
        times = [t for i in range(PINGS) if (t := _ping(wire, 100 + i, 64)) is not None]
        if not times:
            return Seen(True, "datagrams were no longer answered")
        lost = _burst(wire)
        route, mtu = _mtu(wire)
    return Seen(True, "", statistics.median(times) * 1e3, lost, route, mtu)


def _ping(wire: socket.socket, number: int, size: int) -> float | None:
    """Seconds until datagram `number` of `size` bytes was answered; None if it was not in time."""
    start = time.perf_counter()
    mark = struct.pack("!Q", number)
    try:
        wire.send(mark + bytes(size - 8))
        while wire.recv(64) != mark:  # an answer that came too late to an earlier one
            pass
    except OSError:
        return None
    return time.perf_counter() - start


def _burst(wire: socket.socket) -> int:
    """How many of `BURST` datagrams sent at once were not answered."""
    for i in range(BURST):
        with contextlib.suppress(OSError):
            wire.send(struct.pack("!Q", (1 << 32) + i) + bytes(SIZE - 8))
    seen: set[bytes] = set()
    with contextlib.suppress(OSError):
        while len(seen) < BURST:
            mark = wire.recv(64)
            if mark[:4] == b"\0\0\0\1":
                seen.add(mark)
    return BURST - len(seen)


def _mtu(wire: socket.socket) -> tuple[int, int | None]:
    """(MTU of the route, largest packet that arrives whole)."""
    route = wire.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    wire.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)
    for size in sorted({route, *(s for s in _SIZES if s < route)}, reverse=True):
        if size > 65000:  # loopback: no packet is that long on a wire
            size = 65000
        for attempt in range(2):
            if _ping(wire, (size << 40) + attempt, size - _HEADERS) is not None:
                return route, size
    return route, None
