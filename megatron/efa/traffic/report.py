"""One table of all ranks' traffic in a step: to the log, to TensorBoard, and to a file."""

import json
import os
import pickle
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.efa.cluster.current import current
from megatron.efa.traffic.record import Step
from megatron.efa.traffic.times import FABRIC, Row, exposed, rows_of

FILE = "traffic.jsonl"


@dataclass
class Line:
    """One axis on one tier, of a job of R ranks in one step."""

    axis: str
    tier: str
    ranks: int
    """That sent, or waited for, anything."""
    bytes: float
    """Sent by all ranks."""
    messages: float
    seconds: float
    """Median over `ranks` of the time with a transfer under way."""
    exposed: float
    """Median over `ranks` of the time waited."""
    exposed_max: float
    exposed_rank: int
    """The rank that waited longest."""
    gbps: float | None
    """Median over sending ranks of bytes over their time under way, 1e9 bytes a second."""
    of_line: float | None
    """`gbps` as a share of one GPU's line rate, where the cluster's description has it."""


_left: list[str] = []
"""Keys of this rank in the job's store: of the step before, which has been read."""


def tell(step: Step, folder: Path | None) -> None:
    """Gather all ranks' `step`; the last rank, which has upstream's log, writes the report.

    Over the job's store: no rank waits for another but the last, and nothing runs on the devices.
    """
    mine = ([(*key, row) for key, row in rows_of(step).items()], step.seconds, exposed(step))
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    keys = [f"efa_traffic/{step.number}/{each}" for each in range(dist.get_world_size())]
    store.set(keys[rank], pickle.dumps(mine))
    while _left:
        store.delete_key(_left.pop())
    _left.append(keys[rank])
    if rank < len(keys) - 1:
        return
    record = record_of(step.number, [pickle.loads(each) for each in store.multi_get(keys)])
    print(table(record), flush=True)
    _to_tensorboard(record)
    if folder is not None:
        append(folder / FILE, record)


def record_of(number: int, ranks: list[Any]) -> dict[str, Any]:
    """What is written of step `number`; `ranks[r]` is rank r's rows, step time and waited time."""
    by_key: dict[tuple[str, str], dict[int, Row]] = {}
    for rank, (rows, _, _) in enumerate(ranks):
        for axis, tier, row in rows:
            by_key.setdefault((axis, tier), {})[rank] = row
    cluster = current()
    lines = []
    for (axis, tier), rows in sorted(by_key.items()):
        slowest = max(rows, key=lambda rank: rows[rank].exposed)
        rates = [row.timed_bytes / row.seconds for row in rows.values() if row.seconds]
        link = cluster.far if tier == FABRIC else cluster.near
        rate = statistics.median(rates) if rates else None
        lines.append(
            Line(
                axis,
                tier,
                len(rows),
                sum(row.bytes for row in rows.values()),
                sum(row.messages for row in rows.values()),
                statistics.median(row.seconds for row in rows.values()),
                statistics.median(row.exposed for row in rows.values()),
                rows[slowest].exposed,
                slowest,
                None if rate is None else rate / 1e9,
                None if rate is None or link is None else rate / link.peak,
            )
        )
    nodes = [0.0] * len(cluster.nodes)
    for (_, tier), rows in by_key.items():
        for rank, row in rows.items():
            nodes[cluster.node_of(rank)] += row.bytes if tier == FABRIC else 0.0
    return {
        "step": number,
        "ranks": len(ranks),
        "seconds": max(seconds for _, seconds, _ in ranks),
        "exposed": statistics.median(waited for _, _, waited in ranks),
        "rows": [asdict(line) for line in lines],
        "sent_by_node": nodes,
    }


def table(record: dict[str, Any]) -> str:
    """`record` for people: what a GPU sends on average, and the medians of times."""
    ranks = record["ranks"]
    lines = [
        f"traffic of step {record['step']}: {1e3 * record['seconds']:.0f} ms, of which a rank "
        f"waited {1e3 * record['exposed']:.0f} ms for data (median of {ranks})",
        f"{'axis':>12} {'tier':>6} {'MB/GPU':>9} {'messages':>9} {'in flight':>10} "
        f"{'waited':>9} {'(longest, rank)':>18} {'GB/s':>7} {'of line':>8}",
    ]
    for row in record["rows"]:
        rate = "" if row["gbps"] is None else f"{row['gbps']:.3g}"
        share = "" if row["of_line"] is None else f"{row['of_line']:.0%}"
        longest = f"({_ms(row['exposed_max'])}, {row['exposed_rank']})"
        lines.append(
            f"{row['axis']:>12} {row['tier']:>6} {row['bytes'] / ranks / 1e6:9.3f} "
            f"{row['messages'] / ranks:9.1f} {_ms(row['seconds']):>10} {_ms(row['exposed']):>9} "
            f"{longest:>18} {rate:>7} {share:>8}"
        )
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to `path`. A report is not worth a job: what fails is a line on stderr."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        print(f"traffic of step {record['step']} is not in {path}: {error}", file=sys.stderr)


def _to_tensorboard(record: dict[str, Any]) -> None:
    from megatron.training.global_vars import get_tensorboard_writer

    writer = get_tensorboard_writer()
    if writer is None:
        return
    writer.add_scalar("traffic/exposed-ms", 1e3 * record["exposed"], record["step"])
    for row in record["rows"]:
        name = f"traffic/{row['axis']}-{row['tier']}"
        writer.add_scalar(
            f"{name}/mb-per-gpu", row["bytes"] / record["ranks"] / 1e6, record["step"]
        )
        writer.add_scalar(f"{name}/exposed-ms", 1e3 * row["exposed"], record["step"])
        if row["gbps"] is not None:
            writer.add_scalar(f"{name}/gb-per-s", row["gbps"], record["step"])


def write_trace(step: Step, folder: Path) -> None:
    """Write this rank's transfers and waits; `megatron-efa traffic` joins the ranks' files."""
    rank = dist.get_rank()
    events = [
        {
            "name": each.op,
            "axis": each.axis,
            "start": step.began + each.start,
            "seconds": 0.0 if each.end is None else each.end - each.start,
            "node_bytes": each.sent.node_bytes,
            "fabric_bytes": each.sent.fabric_bytes,
        }
        for each in (*step.transfers, *step.waits)
    ]
    node = current().nodes[current().node_of(rank)].name
    path = folder / f"trace-step{step.number}" / f"rank{rank:05d}.json"
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(
            json.dumps({"rank": rank, "node": node, "step": step.number, "events": events})
        )
        aside.replace(path)
    except OSError as error:
        print(f"rank {rank}'s trace of step {step.number} is not written: {error}", file=sys.stderr)
