"""The network checks of a job: all ranks take part, the head judges.

Rounds of disjoint pairs; between rounds the meeting exchanges what was seen, with a time limit: a
node that falls silent is absent from then on and holds up nobody.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.efa.doctor.checks.plugin import selected
from megatron.efa.doctor.context import Context, expected
from megatron.efa.doctor.gather import Meeting
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.network import burst, counters, judge
from megatron.efa.doctor.network.probe import Echo, Seen, look
from megatron.efa.doctor.network.schedule import partner, rounds
from megatron.efa.doctor.registry import Finding, Skip

CHECKS = {
    "reachability": "every node reaches every other over TCP",
    "link-mtu": "packets of the full size arrive, and all nodes have one MTU",
    "link-loss": "no datagram of a burst gets lost",
    "link-latency": "round trips are near the fleet's median",
    "link-bandwidth": "every pair, and every rail, is near the fleet's median",
    "compute": "no GPU is slower than the fleet's median",
    "efa-traffic": "EFA's counters rise in a burst, without retransmit timeouts",
    "nccl-network": "NCCL selects EFA on every rank, by its own log",
}
_LOOK_S = 25.0
"""The longest that one look at a peer takes: connecting, pings, burst, sizes."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 16
    """Peers that a node is measured against, at most."""
    megabytes: int | None = None
    """Of a burst; None: by backend."""
    seconds: float = 20.0
    """That one pair's burst may take."""


class Network:
    """The state of this rank in the network checks."""

    def __init__(self, meeting: Meeting, host: Host, context: Context, effort: Effort) -> None:
        self.meeting, self.host, self.context, self.effort = meeting, host, context, effort
        here = meeting.here
        nodes = meeting.nodes()
        self.leaders = {node: ranks[0] for node, ranks in nodes.items()}
        self.order = sorted(nodes)  # schedule's numbers are places in this list
        self.node = here.node
        self.leads = self.leaders[self.node] == here.rank
        self.address = meeting.addresses[self.leaders[self.node]]
        self.schedule = rounds(len(self.order), effort.rounds)
        self.seen: dict[tuple[int, int], dict[str, Any]] = {}
        """Of (from, to); on the head."""
        self.apart: set[frozenset[int]] = set()
        """Pairs that do not reach each other."""

    def examine(self) -> list[Finding]:
        """All findings, on the head; parts of them on the others."""
        names = {node: self.meeting.names[rank] for node, rank in self.leaders.items()}
        seen = self._look()
        found = self._judged(seen, judge.Names(names)) if self.meeting.here.rank == 0 else []
        device, fast = self._burst(names)
        return [*found, *device, *fast]

    def _peer(self, pairs: list[tuple[int, int]]) -> int | None:
        """The node that this one meets in a round; None if it rests or the other is absent."""
        place = partner(pairs, self.order.index(self.node))
        if place is None or self.leaders[self.order[place]] not in self.meeting.present:
            return None
        return self.order[place]

    def _look(self) -> dict[tuple[int, int], dict[str, Any]]:
        """What each node's leader saw of its peers, by (from, to)."""
        with Echo(self.address) as echo:
            told = self.meeting.exchange(list(echo.ports) if self.leads else None, 30)
            ports = {rank // self.meeting.here.locals: p for rank, p in told.items() if p}
            for pairs in self.schedule:
                peer = self._peer(pairs) if self.leads else None
                mine = None
                if peer is not None and peer in ports:
                    address = self.meeting.addresses[self.leaders[peer]]
                    view = look(self.address, address, tuple(ports[peer]))
                    mine = [peer, view.as_dict()]
                for rank, view in self.meeting.gather(mine, _LOOK_S).items():
                    if view:
                        self.seen[(rank // self.meeting.here.locals, view[0])] = view[1]
                self._note_silent(pairs)
        bad = [[a, b] for (a, b), view in self.seen.items() if not view["reached"]]
        told = self.meeting.exchange(bad if self.meeting.here.rank == 0 else None, 30)[0]
        self.apart = {frozenset(pair) for pair in told}
        return self.seen

    def _note_silent(self, pairs: list[tuple[int, int]]) -> None:
        """A node that fell silent in this round was not reached by whom it should have met."""
        for a, b in pairs:
            for one, other in ((self.order[a], self.order[b]), (self.order[b], self.order[a])):
                if (one, other) not in self.seen:
                    view = Seen(False, "it fell silent").as_dict()
                    self.seen[(one, other)] = view

    def _judged(self, seen: Mapping[Any, Any], names: judge.Names) -> list[Finding]:
        times = {pair: view["milliseconds"] for pair, view in seen.items() if view["milliseconds"]}
        return [
            *_found("reachability", lambda: judge.reachability(seen, names)),
            *_found("link-mtu", lambda: judge.mtu(seen, names)),
            *_found("link-loss", lambda: judge.loss(seen, names)),
            *_found("link-latency", lambda: judge.latency(times, names)),
        ]

    def _burst(self, names: Mapping[int, str]) -> tuple[list[Finding], list[Finding]]:
        """Findings of the ranks' own speed, and of the traffic between them."""
        backends = self.meeting.exchange(burst.backend(), 120)
        kinds = set(backends.values())
        if kinds - {"gloo", "nccl"} or len(kinds) > 1:
            who = [names[r // self.meeting.here.locals] for r, b in backends.items() if b != "nccl"]
            reason = f"not all ranks have PyTorch and a GPU (not {', '.join(sorted(set(who)))})"
            skipped = [Finding("skipped", reason, check=c) for c in list(CHECKS)[4:]]
            return skipped, []
        import torch

        nccl = kinds == {"nccl"}
        device = torch.device("cpu")
        if nccl:  # LOCAL_RANK is not always this rank's number on its node: ranks may share a GPU
            local = int(self.host.environ.get("LOCAL_RANK", self.meeting.here.local))
            device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(device)
        speeds = self.meeting.gather(burst.multiply(device), 120)
        locals_ = self.meeting.here.locals
        by_rank = {(names[r // locals_], r % locals_): s for r, s in speeds.items()}
        computed = _found("compute", lambda: judge.compute(by_rank, device.type)) if by_rank else []
        return computed, self._pairs(names, device, nccl)

    def _pairs(self, names: Mapping[int, str], device: Any, nccl: bool) -> list[Finding]:
        log = _nccl_log() if nccl else None
        before = counters.read(self.host) if self.leads else {}
        rates = self._rates(
            device, (self.effort.megabytes or burst.MEGABYTES["nccl" if nccl else "gloo"]) << 20
        )
        counted = counters.between(before, counters.read(self.host)) if self.leads else None
        text = Path(log).read_text(errors="replace") if log and Path(log).exists() else ""
        told = self.meeting.gather([counted, self._selected(text) if nccl else []], 60)
        if self.meeting.here.rank:
            return []
        by_name = {names[r // self.meeting.here.locals]: v[0] for r, v in told.items() if v[0]}
        link = self.context.cluster.far if self.context.cluster else None
        found = [
            *_found(
                "link-bandwidth",
                lambda: judge.bandwidth(rates, judge.Names(names), link.peak if link else None),
            ),
            *_found("efa-traffic", lambda: judge.traffic(by_name, nccl)),
        ]
        for rank, (_, said) in told.items():
            node = names[rank // self.meeting.here.locals]
            found += [replace(Finding(**f), check="nccl-network", node=node) for f in said]
        if not nccl:
            found.append(Finding("skipped", "no GPU: NCCL was not used", check="nccl-network"))
        return found

    def _selected(self, text: str) -> list[dict[str, str]]:
        """What this rank's own NCCL log says of the network, on an EFA machine."""
        try:
            machine = expected(self.host, self.context)
        except Skip as reason:
            return [Finding("skipped", str(reason)).as_dict()]
        return [finding.as_dict() for finding in selected(text, "NCCL's log", machine)]

    def _rates(self, device: Any, size: int) -> dict[Any, float | None]:
        """Bytes/s of each pair of (node, rail), the slower direction; None: it did not end."""
        head = self.meeting.here.rank == 0
        store = burst.open_store(self.address, 0, True) if head else None
        told = self.meeting.exchange(store.port if store else None, 30)
        if store is None:
            with contextlib.suppress(RuntimeError):  # then this rank's pairs fail, and name it
                store = burst.open_store(self.meeting.addresses[0], told[0], False)
        directed: dict[Any, float | None] = {}
        rail = self.meeting.here.local
        for number, pairs in enumerate(self.schedule):
            peer = self._peer(pairs)
            mine = None
            if peer is not None and frozenset((self.node, peer)) not in self.apart:
                mine = [peer, rail, self._pair(store, f"{number}", peer, device, size)]
            for rank, result in self.meeting.gather(mine, 2 * self.effort.seconds + 10).items():
                if result:
                    node = rank // self.meeting.here.locals
                    directed[((result[0], result[1]), (node, result[1]))] = result[2]
        both: dict[Any, float | None] = {}
        for pair, rate in directed.items():
            key = tuple(sorted(pair))
            both[key] = (
                None if None in (rate, both.get(key, rate)) else min(rate, both.get(key, rate))
            )
        return both

    def _pair(self, store: Any, round_: str, peer: int, device: Any, size: int) -> float | None:
        """Bytes/s that this rank receives from its partner on node `peer`; None if not in time."""
        if store is None:
            return None
        low, high = sorted((self.node, peer))
        me, seconds = int(self.node == high), self.effort.seconds
        name = f"round {round_} nodes {low} {high} rail {self.meeting.here.local}"
        try:
            with burst.group(store, name, me, self.address, seconds) as pair:
                return burst.measure(pair, me, size, device, seconds)["rate"]
        except RuntimeError:  # torch's timeouts and broken connections
            return None


def _found(check: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """Findings under the check's id; a Skip becomes one."""
    try:
        found = look()
    except Skip as reason:
        found = [Finding("skipped", str(reason))]
    return [replace(finding, check=check) for finding in found]


def _nccl_log() -> str:
    """Let NCCL write what it selects to a file of this process, and end waits in time; its name."""
    path = f"{tempfile.mkdtemp(prefix='megatron-efa-doctor-')}/nccl.log"
    for name, value in (("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,NET")):
        os.environ[name] = value
    os.environ["NCCL_DEBUG_FILE"] = path
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # a wait raises after its time; nothing aborts us
    return path
