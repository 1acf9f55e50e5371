"""From measurements of pairs to nodes and links by name, each against the fleet's median.

No threshold is absolute: sizes, kinds and numbers of nodes differ; a fleet is its own measure.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from megatron.efa.cluster.discover.assemble import some
from megatron.efa.doctor.network.counters import BYTES, TROUBLE
from megatron.efa.doctor.network.probe import BURST
from megatron.efa.doctor.registry import Finding, Skip, fail, ok, warn

SLOW = 0.75
"""Of the median: below it a link is slow; a healthy fleet's pairs lie within about a tenth."""
BROKEN = 0.5
SICK = {"cuda": 0.9, "cpu": 0.5}
"""Of the median of the ranks' matrix products. CPUs share caches and clocks; GPUs do not."""
LOST = 2
"""Datagrams of a burst that may get lost by chance, less one."""
LATE = 5.0
LATE_MS = 1.0
"""A round trip is late above five medians and a millisecond more."""
REPEATED = 0.01

type Pair = tuple[Hashable, Hashable]


def blame(bad: Iterable[Pair], measured: Iterable[Pair]) -> tuple[list[Hashable], list[Pair]]:
    """(ends to which bad pairs point, bad pairs that point to no end), pairs being undirected.

    The end with most bad pairs is blamed as long as it has two or more and they are most of its
    own; its pairs are then explained. A single bad pair is that link's fault alone.
    """
    left = {tuple(sorted(pair)) for pair in bad}
    of = Counter(end for pair in {tuple(sorted(p)) for p in measured} for end in pair)
    ends: list[Hashable] = []
    while left:
        count = Counter(end for pair in left for end in pair)
        end, most = max(count.items(), key=lambda item: (item[1], item[1] / of[item[0]]))
        if most < 2 or most <= of[end] / 2:
            break
        ends.append(end)
        left = {pair for pair in left if end not in pair}
    return ends, sorted(left)


class Names:
    """Nodes by name, for sentences."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def __call__(self, node: int) -> str:
        return self._names[node]

    def accused(self, bad: Iterable[Pair], measured: Iterable[Pair]) -> list[str]:
        """Those blamed: `node3`, or `the link node1 - node2`."""
        nodes, links = blame(bad, measured)
        return [*map(self, nodes), *(f"the link {self(a)} - {self(b)}" for a, b in links)]


def reachability(seen: Mapping[Pair, Any], names: Names) -> list[Finding]:
    """Pairs (from, to) that answered over TCP."""
    lost = [pair for pair, view in seen.items() if not view["reached"]]
    if not lost:
        return [ok(f"{len(seen)} connections between nodes")]
    found = []
    for who in names.accused(lost, seen):
        reasons = Counter(seen[p]["reason"] for p in lost)
        tried = [f"{names(a)} to {names(b)}" for a, b in sorted(lost)]
        found.append(
            fail(
                f"{who} cannot be reached",
                some(tried),
                why=f"ranks there never meet the others ({reasons.most_common(1)[0][0]})",
                do="see the security group, routes and the node itself; leave it out until it "
                "is mended",
            )
        )
    return found


def mtu(seen: Mapping[Pair, Any], names: Names) -> list[Finding]:
    """Routes' MTUs, and the largest packets that arrived."""
    views = {pair: view for pair, view in seen.items() if view["route_mtu"]}
    if not views:
        raise Skip("no datagram was answered: UDP is filtered")
    routes = {}
    for (node, _), view in views.items():
        routes[node] = max(routes.get(node, 0), view["route_mtu"])
    usual = Counter(routes.values()).most_common(1)[0][0]
    odd = {node: size for node, size in routes.items() if size != usual}
    found = [
        fail(
            f"{names(node)} has an MTU of {size}, the others {usual}",
            "MTU",
            why="packets of the others' size never arrive there: connections open, then hang at "
            "the first large message",
            do=f"ip link set dev IFACE mtu {usual} on {names(node)} (or the same on all)",
        )
        for node, size in odd.items()
    ]
    short = [
        pair
        for pair, view in views.items()
        if (view["mtu"] or 0) < view["route_mtu"] and not set(pair) & set(odd)
    ]
    for who in names.accused(short, views):
        sizes = [views[pair]["mtu"] or 0 for pair in short]
        found.append(
            fail(
                f"packets above {min(sizes)} bytes do not arrive at or from {who}",
                "path MTU",
                why=f"the nodes send packets of {usual} bytes: connections open, then hang at the "
                "first large message",
                do="set one MTU on all nodes and on what lies between them",
            )
        )
    return found or [ok(f"packets of {usual} bytes arrive between all nodes")]


def loss(seen: Mapping[Pair, Any], names: Names) -> list[Finding]:
    """Datagrams of a burst that were not answered."""
    views = {pair: view for pair, view in seen.items() if view["reached"]}
    silent = [pair for pair, view in views.items() if view["milliseconds"] is None]
    if not views or len(silent) == len(views):
        raise Skip("no datagram was answered: UDP is filtered")
    lossy = [p for p, view in views.items() if p in silent or view["lost"] >= LOST]
    found = []
    for who in names.accused(lossy, views):
        most = max(BURST if p in silent else views[p]["lost"] for p in lossy)
        found.append(
            fail(
                f"{who} loses packets, {most} of {BURST} in the worst burst",
                "UDP",
                why="every loss stalls whoever waits for that packet: steps take turns at being "
                "slow",
                do="see drops on its interface (ethtool -S) and replace the node if they go on",
            )
        )
    return found or [ok(f"{sum(v['lost'] for v in views.values())} of {BURST * len(views)} lost")]


def latency(times: Mapping[Pair, float], names: Names) -> list[Finding]:
    """Round trips in milliseconds."""
    if not times:
        raise Skip("no round trip was measured")
    usual = _usual(times, min)
    late = [pair for pair, ms in times.items() if ms > LATE * usual and ms > usual + LATE_MS]
    found = []
    for who in names.accused(late, times):
        found.append(
            warn(
                f"{who}: up to {max(times[p] for p in late):.3g} ms, the median is {usual:.3g} ms",
                "round trip",
                why="pipeline stages and small collectives wait for it",
                do="see whether it shares its network with other jobs, or is in another zone",
            )
        )
    return found or [ok(f"{usual:.3g} ms, {max(times.values()):.3g} at most")]


def bandwidth(
    rates: Mapping[Pair, float | None], names: Names, expected: float | None = None
) -> list[Finding]:
    """Bytes/s of pairs of (node, rail), the slower direction; None: it did not end in time.

    `expected` is what the catalogue says of one rank's share: a whole fleet can be slow.
    """
    good = [rate for rate in rates.values() if rate]
    if not good:
        raise Skip("no pair could be measured")
    usual = _usual({pair: rate for pair, rate in rates.items() if rate}, max)
    found = []
    slow = [pair for pair, rate in rates.items() if (rate or 0) < SLOW * usual]
    rails = {node: {end for pair in rates for end in pair if end[0] == node} for node, _ in
             {end for pair in rates for end in pair}}  # fmt: skip
    ends, links = blame(slow, rates)
    by_node: dict[int, list[int]] = {}
    for node, rail in ends:
        by_node.setdefault(node, []).append(rail)
    accused: list[tuple[str, Callable[[Pair], bool]]] = []
    for node, bad in by_node.items():
        whole = len(bad) == len(rails[node])
        rail = "" if whole else f"{'rail' if len(bad) == 1 else 'rails'} {_list(bad)} of "
        accused.append((rail + names(node), lambda p, n=node, b=bad: any((n, r) in p for r in b)))
    for a, b in links:
        rail = f" (rail {a[1]})" if len(rails[a[0]]) > 1 else ""
        text = f"the link {names(a[0])} - {names(b[0])}{rail}"
        accused.append((text, lambda p, own={a, b}: set(p) == own))
    for who, concerns in accused:
        own = {pair: rates[pair] or 0 for pair in slow if concerns(pair)}
        worst = list(own.values())
        (a, _), (b, _) = min(own, key=own.get)
        share = statistics.median(worst) / usual
        what = f"{who}: {_rate(statistics.median(worst))}, the median is {_rate(usual)}"
        if not any(worst):
            what = f"{who}: the burst did not end in time"
        say = fail if share < BROKEN else warn
        found.append(
            say(
                f"{what} ({share:.0%})" if any(worst) else what,
                f"worst {names(a)} - {names(b)}",
                why="every collective waits for its slowest link",
                do="leave the node out (sbatch --exclude, cordon) and have it replaced"
                if "link" not in who
                else "see what lies between the two; place ranks so that they talk less",
            )
        )
    if expected and usual < BROKEN * expected:
        found.append(
            warn(
                f"the median is {_rate(usual)}, the catalogue expects {_rate(expected)} a rank",
                "bandwidth",
                why="all links being slow points to TCP instead of EFA, or to devices missing "
                "on all",
                do="see plugin-selected, efa-devices and efa-traffic",
            )
        )
    slowest = min(good)
    return found or [ok(f"{len(rates)} pairs, median {_rate(usual)}, slowest {_rate(slowest)}")]


def compute(speeds: Mapping[tuple[str, int], float], device: str) -> list[Finding]:
    """Operations a second of ranks, by (node, local rank)."""
    usual = statistics.median(speeds.values())
    sick = {who: speed for who, speed in speeds.items() if speed < SICK[device] * usual}
    what = "GPU" if device == "cuda" else "rank"
    found = [
        fail(
            f"{what} {local} of {node} computes at {speed / usual:.0%} of the median",
            f"{speed / 1e12:.3g} of {usual / 1e12:.3g} TFLOPS",
            why="all others wait for it in every step",
            do="see gpu-health and its clocks (nvidia-smi -q -d CLOCK,POWER); replace the node"
            if device == "cuda"
            else "see what else runs there (top), and its clocks",
        )
        for (node, local), speed in sick.items()
    ]
    return found or [ok(f"{len(speeds)} ranks, median {usual / 1e12:.3g} TFLOPS")]


def traffic(counted: Mapping[str, Mapping[str, int]], sent: bool) -> list[Finding]:
    """What each node's EFA counters and TCP counted during the burst; `sent`: over NCCL."""
    found = []
    for node, counts in counted.items():
        trouble = {name: counts[name] for name in TROUBLE if counts.get(name)}
        if trouble:
            text = ", ".join(f"{name} +{count}" for name, count in trouble.items())
            timed_out = any("timeout" in name or "unresponsive" in name for name in trouble)
            found.append(
                (fail if timed_out else warn)(
                    f"{node}: {text}",
                    "hw_counters",
                    why="packets had to be sent again, or peers did not answer, during one burst",
                    do="if it comes again, leave the node out and have it replaced",
                )
            )
        efa = [counts[name] for name in BYTES if name in counts]
        if sent and efa and not any(efa):
            found.append(
                fail(
                    f"{node}: no EFA counter rose while NCCL sent",
                    "hw_counters",
                    why="the traffic went over TCP, at a fraction of the speed",
                    do="see plugin-found, plugin-loads and plugin-selected",
                )
            )
        repeated, all_sent = counts.get("tcp_repeated", 0), counts.get("tcp_sent", 0)
        if all_sent and repeated > REPEATED * all_sent:
            found.append(
                warn(
                    f"{node}: TCP sent {repeated} of {all_sent} segments again",
                    "/proc/net/snmp",
                    why="the path to it loses packets",
                    do="see link-loss and the drops of its interface",
                )
            )
    if found:
        return found
    has = any(name in counts for counts in counted.values() for name in BYTES)
    return [ok("EFA's counters rose, no retransmit timeouts" if has and sent else
               "no TCP segment was sent again in numbers")]  # fmt: skip


def _usual(values: Mapping[Pair, float], best: Callable[[list[float]], float]) -> float:
    """The median over ends of each one's best pair: right while most ends are well.

    (The median over pairs is not: one slow node of four spoils half of the pairs.)
    """
    of: dict[Hashable, list[float]] = {}
    for pair, value in values.items():
        for end in pair:
            of.setdefault(end, []).append(value)
    return statistics.median(best(all_) for all_ in of.values())


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
