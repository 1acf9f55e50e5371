"""Traces of ranks, joined into one file that Perfetto (ui.perfetto.dev) and Chrome draw."""

import json
from pathlib import Path
from typing import Any

from megatron.efa.errors import EfaError


def join(folder: Path) -> dict[str, Any]:
    """The Chrome trace of the ranks in `folder`: a process a rank, a row an axis, waits apart.

    Hosts' clocks are taken as they are: between nodes rows shift by as much as those differ.
    Raises EfaError for a folder without traces, or one that is not ours.
    """
    paths = sorted(folder.glob("rank*.json"))
    if not paths:
        raise EfaError(f"{folder} holds no rank*.json: give a trace-stepN folder")
    events: list[dict[str, Any]] = []
    for path in paths:
        try:
            rank = json.loads(path.read_text())
            events += _of_rank(rank)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EfaError(f"{path} is not a trace of a rank ({error})") from error
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] -= first
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_rank(rank: dict[str, Any]) -> list[dict[str, Any]]:
    number = rank["rank"]
    name = f"rank {number} on {rank['node']}"
    named = [_meta("process_name", number, {"name": name})]
    named.append(_meta("process_sort_index", number, {"sort_index": number}))
    rows: dict[str, list[float]] = {}
    events = []
    for event in sorted(rank["events"], key=lambda event: event["start"]):
        row = f"{event['axis']} {'waits' if event['name'] == 'wait' else 'transfers'}"
        lane = _free(rows.setdefault(row, []), event["start"], event["seconds"])
        events.append(
            {
                "name": event["name"],
                "ph": "X",
                "pid": number,
                "tid": f"{row} {lane}" if lane else row,
                "ts": event["start"] * 1e6,
                "dur": event["seconds"] * 1e6,
                "args": {k: event[k] for k in ("node_bytes", "fabric_bytes")},
            }
        )
    # Perfetto wants numbers for threads, and names for the numbers.
    numbers = {name: i for i, name in enumerate(sorted({event["tid"] for event in events}))}
    for event in events:
        event["tid"] = numbers[event["tid"]]
    named += [_meta("thread_name", number, {"name": n}, tid) for n, tid in numbers.items()]
    return named + events


def _free(ends: list[float], start: float, seconds: float) -> int:
    """The first lane of a row that is free at `start`: slices of one lane may not overlap."""
    for lane, end in enumerate(ends):
        if end <= start:
            ends[lane] = start + seconds
            return lane
    ends.append(start + seconds)
    return len(ends) - 1


def _meta(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
