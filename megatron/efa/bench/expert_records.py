"""Records of `bench expert` from what its ranks saw, and how they are shown."""

import math
from collections.abc import Sequence
from typing import Any

from megatron.efa.bench import bounds, overlap, report, statistics
from megatron.efa.bench.expert_rank import DTYPES, Case, Seen, Turns

_UPSTREAM = "alltoall"


def records_of(
    case: Case,
    nodes: int,
    per_node: int,
    link_rate: float | None,
    near_rate: float,
    seen: Sequence[Seen],
    backend: str,
) -> list[dict[str, Any]]:
    """One record an arm, from what the ranks saw of one case.

    `link_rate` and `near_rate` are bytes a second, of a node's link and of the rank that sends
    slowest inside its node.
    """
    row = case.hidden * DTYPES[case.dtype].itemsize
    node_of = [rank // per_node for rank in range(nodes * per_node)]

    def matrix(name: str) -> list[list[int]]:
        total = [[0] * nodes for _ in range(nodes)]
        for rank, one in enumerate(seen):
            for node, rows in enumerate(getattr(one, name)):
                total[node_of[rank]][node] += rows
        return total

    rows, copies = matrix("rows"), matrix("copies")
    bound = bounds.bound_bytes(rows, row)
    limit = None if link_rate is None else bounds.bound_seconds(rows, row, link_rate)
    ratio = bounds.leaving(copies) / bounds.leaving(rows) if bounds.leaving(rows) else None
    turns = [[one.turns[arm] for one in seen] for arm in range(len(seen[0].turns))]
    times = [_spans(ranks, "starts", "ends") for ranks in turns]
    flat = next((t for t, r in zip(times, turns, strict=True) if str(r[0].arm) == _UPSTREAM), None)
    records = []
    for ranks, seconds in zip(turns, times, strict=True):
        ms = statistics.summary(seconds).scaled(1e3)
        sent = [
            sum(counts) for counts in zip(*(one.sent for one in ranks if one.sent), strict=True)
        ]
        crossed = round(statistics.summary(sent).median) if sent else None
        gain = None if flat is None else statistics.ratio(flat, seconds)
        slept = [max(waits) for waits in zip(*(one.slept for one in ranks), strict=True)]
        records.append(
            {
                "dispatcher": ranks[0].arm.dispatcher,
                "chunks": ranks[0].arm.chunks,
                "layer": case.layer.name,
                "routing": case.kind if case.recorded is None else case.recorded.name,
                "nodes": nodes,
                "ranks_per_node": per_node,
                "backend": backend,
                "dtype": case.dtype,
                "hidden": case.hidden,
                "tokens_per_rank": case.tokens,
                "experts": case.layer.experts,
                "topk": case.layer.topk,
                "rounds": ms.rounds,
                "ms": ms.median,
                "ms_low": ms.low,
                "ms_high": ms.high,
                "ms_forward": statistics.summary(_spans(ranks, "starts", "middles")).median * 1e3,
                "exposed_ms": statistics.summary(slept).median * 1e3 if slept else None,
                "inter_node_bytes": crossed,
                "payload_bytes": sum(one.payload for one in ranks),
                "bound_bytes": bound,
                "bytes_over_bound": None if crossed is None or not bound else crossed / bound,
                "bound_ms": None if limit is None else limit * 1e3,
                "messages": sum(one.messages for one in ranks),
                "speedup_vs_upstream": None if gain is None else gain.median,
                "speedup_low": None if gain is None else gain.low,
                "speedup_high": None if gain is None else gain.high,
                "byte_ratio": ratio,
                "link_bytes_per_second": link_rate,
                "near_to_far": None
                if link_rate is None or math.isinf(near_rate)
                else near_rate / (link_rate / per_node),
                **overlap.of_ranks([one.busy for one in ranks]),
                "largest_difference_roundings": max(one.error for one in seen),
            }
        )
    return records


def _spans(ranks: Sequence[Turns], first: str, last: str) -> list[float]:
    """Seconds of each turn from the first rank's start to the last rank's end."""
    starts = zip(*(getattr(one, first) for one in ranks), strict=True)
    ends = zip(*(getattr(one, last) for one in ranks), strict=True)
    return [max(end) - min(start) for start, end in zip(starts, ends, strict=True)]


def _name(record: dict[str, Any]) -> str:
    chunks = "" if record["chunks"] is None else f" x{record['chunks']}"
    return record["dispatcher"] + chunks


def _group(record: dict[str, Any]) -> str:
    shape = f"{record['nodes']}x{record['ranks_per_node']}"
    return f"{shape} {record['layer']} {record['routing']}"


def table(records: Sequence[dict[str, Any]]) -> str:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    header = ["nodes x ranks, layer, routing", "dispatcher", "ms", "quartiles", "exposed ms",
              "bound ms", "MB between nodes", "over bound", "messages", "speedup",
              "byte ratio"]  # fmt: skip
    rows = []
    for r in records:
        crossed = None if r["inter_node_bytes"] is None else r["inter_node_bytes"] / 1e6
        rows.append(
            [_group(r), _name(r), f"{r['ms']:.0f}", f"{r['ms_low']:.0f} to {r['ms_high']:.0f}",
             cell(r["exposed_ms"], ".0f"), cell(r["bound_ms"], ".0f"), cell(crossed, ".1f"),
             cell(r["bytes_over_bound"], ".3f"), r["messages"],
             cell(r["speedup_vs_upstream"], ".2f"), cell(r["byte_ratio"], ".2f")]
        )  # fmt: skip
    return report.table(header, rows)


def draw(pyplot: Any, records: Sequence[dict[str, Any]]) -> Any:
    """Times and bytes of each dispatcher, with the bounds of both, by shape and routing."""
    groups = list(dict.fromkeys(_group(r) for r in records))
    names = list(dict.fromkeys(_name(r) for r in records))
    figure, (time, size) = pyplot.subplots(
        2, 1, figsize=(max(7, 1.1 * len(groups) * len(names)), 8), layout="constrained"
    )
    width = 0.8 / len(names)
    for record in records:
        group, arm = groups.index(_group(record)), names.index(_name(record))
        x, colour = group - 0.4 + width * (arm + 0.5), f"C{arm}"
        below, above = record["ms"] - record["ms_low"], record["ms_high"] - record["ms"]
        time.bar(x, record["ms"], width * 0.9, yerr=[[below], [above]], color=colour, capsize=3)
        if record["speedup_vs_upstream"] is not None:
            text = f"{record['speedup_vs_upstream']:.2f}x"
            time.annotate(text, (x, record["ms_high"]), ha="center", va="bottom", fontsize=8)
        if record["inter_node_bytes"] is not None:
            size.bar(x, record["inter_node_bytes"] / 1e6, width * 0.9, color=colour)
        ends = ([group - 0.42, group + 0.42],)
        size.plot(*ends, [record["bound_bytes"] / 1e6] * 2, "k--", linewidth=1)
        if record["bound_ms"] is not None:
            time.plot(*ends, [record["bound_ms"]] * 2, "k--", linewidth=1)
    for axes, label in ((time, "ms, forward + backward"), (size, "MB between nodes")):
        axes.set_xticks(range(len(groups)), groups, fontsize=8)
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=f"C{i}") for i in range(len(names))]
    handles.append(pyplot.Line2D([], [], color="k", linestyle="--"))
    time.legend(handles, [*names, "bound"], frameon=False, fontsize=8)
    return figure
