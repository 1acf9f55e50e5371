"""Records of `bench collectives` from what its ranks saw, and how they are shown."""

from collections.abc import Sequence
from typing import Any

from megatron.efa.bench import report, statistics
from megatron.efa.bench.collectives_rank import Case, Seen, Turns


def bound(collective: str, size: int, nodes: int, per_node: int) -> float:
    """Fewest bytes that must leave the nodes, all together, for `size` bytes.

    Reductions and gathers: each node, as one rank of N, sends (N-1)/N of the message, twice for an
    all-reduce (Patarasu and Yuan, 2009). An all-to-all: what is for other nodes. A broadcast: the
    message, to each other node.
    """
    if collective == "broadcast":
        return (nodes - 1) * size
    if collective == "all_to_all":
        return nodes * per_node * size * (nodes - 1) / nodes
    return (2 if collective == "all_reduce" else 1) * (nodes - 1) * size


def records_of(
    cases: Sequence[Case],
    nodes: int,
    per_node: int,
    link_rate: float | None,
    seen: Sequence[Sequence[Seen]],
    backend: str,
) -> list[dict[str, Any]]:
    """One record a case; `seen` is [rank][case]."""
    records = []
    for index, case in enumerate(cases):
        ranks = [cases_of_rank[index] for cases_of_rank in seen]
        flat, ours = ([rank.turns[mode] for rank in ranks] for mode in ("off", "on"))
        seconds = [_spans(turns) for turns in (flat, ours)]
        gain = statistics.ratio(*seconds)
        least = bound(case.collective, case.size, nodes, per_node)
        sent = [_crossed(turns) for turns in (flat, ours)]
        times = [statistics.summary(part).scaled(1e3) for part in seconds]
        records.append(
            {
                "collective": case.collective,
                "bytes": case.size,
                "dtype": case.dtype,
                "nodes": nodes,
                "ranks_per_node": per_node,
                "backend": backend,
                "rounds": times[0].rounds,
                "flat_ms": times[0].median,
                "two_level_ms": times[1].median,
                "two_level_ms_low": times[1].low,
                "two_level_ms_high": times[1].high,
                "speedup": gain.median,
                "speedup_low": gain.low,
                "speedup_high": gain.high,
                "flat_inter_node_bytes": sent[0],
                "two_level_inter_node_bytes": sent[1],
                "bound_bytes": round(least),
                "two_level_over_bound": None if None in sent or not least else sent[1] / least,
                "bound_ms": None if link_rate is None else least / nodes / link_rate * 1e3,
                "pieces": ranks[0].pieces,
                "auto": "two-level" if ranks[0].auto == "on" else "flat",
            }
        )
    return records


def _spans(turns: Sequence[Turns]) -> list[float]:
    """Seconds of each round: from the last rank's start to the last rank's end."""
    starts = [max(times) for times in zip(*(turn.starts for turn in turns), strict=True)]
    ends = [max(times) for times in zip(*(turn.ends for turn in turns), strict=True)]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def _crossed(turns: Sequence[Turns]) -> int | None:
    """Bytes that left the nodes in a round, all together; None where links are not counted."""
    counted = [turn.sent for turn in turns if turn.sent]
    if not counted:
        return None
    return round(statistics.summary([sum(sent) for sent in zip(*counted, strict=True)]).median)


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as text."""
    header = ["collective", "nodes", "size", "flat ms", "two-level ms", "speedup", "flat MB",
              "two-level MB", "bound MB", "over bound", "auto"]  # fmt: skip
    rows = []
    for r in records:
        over = r["two_level_over_bound"]
        rows.append(
            [r["collective"], f"{r['nodes']}x{r['ranks_per_node']}", _spelled(r["bytes"]),
             f"{r['flat_ms']:.1f}", f"{r['two_level_ms']:.1f}", f"{r['speedup']:.2f}",
             _mega(r["flat_inter_node_bytes"]), _mega(r["two_level_inter_node_bytes"]),
             _mega(r["bound_bytes"]), "-" if over is None else f"{over:.3f}", r["auto"]]
        )  # fmt: skip
    return report.table(header, rows)


def _mega(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f}"


def _spelled(size: int) -> str:
    for unit, letter in ((1 << 20, " MiB"), (1 << 10, " KiB")):
        if size >= unit and not size % unit:
            return f"{size // unit}{letter}"
    return f"{size} B"


def draw(pyplot: Any, records: Sequence[dict[str, Any]]) -> Any:
    """Speed-up over size, one panel a collective, one line a shape; a cross where auto is flat."""
    names = list(dict.fromkeys(r["collective"] for r in records))
    shapes = list(dict.fromkeys((r["nodes"], r["ranks_per_node"]) for r in records))
    figure, panels = pyplot.subplots(
        1, len(names), figsize=(4.5 * len(names), 4), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, name in zip(panels[0], names, strict=True):
        for color, shape in enumerate(shapes):
            of = [
                r
                for r in records
                if r["collective"] == name and (r["nodes"], r["ranks_per_node"]) == shape
            ]
            sizes, gains = [r["bytes"] for r in of], [r["speedup"] for r in of]
            around = [
                [r["speedup"] - r["speedup_low"] for r in of],
                [r["speedup_high"] - r["speedup"] for r in of],
            ]
            label = f"{shape[0]} nodes x {shape[1]}"
            axes.errorbar(sizes, gains, around, color=f"C{color}", marker="o", label=label)
            left = [(r["bytes"], r["speedup"]) for r in of if r["auto"] == "flat"]
            if left:
                axes.plot(*zip(*left, strict=True), "kx", markersize=9)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_title(name)
        axes.set_xlabel("bytes")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("flat time / two-level time (x: auto stays flat)")
    panels[0][0].legend()
    return figure
