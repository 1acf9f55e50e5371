"""A run's file of recorded steps: a line is added for each, and all are read and compared."""

import errno
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from megatron.efa.errors import EfaError

FILE = "traffic.jsonl"
_SUMS = ("bytes", "messages")
"""Over all ranks."""
_ADDED = (*_SUMS, "seconds", "exposed", "exposed_max")
_RATES = ("gbps", "of_line")
_MEANT = 'of `megatron-efa traffic`\'s: a line of "step", "ranks", "rows", ...'


def append(path: Path, record: dict[str, Any]) -> None:
    """Add a line to `path`. A report is not worth a job: what fails is a line on stderr.

    A line is there as a whole or not at all: what a job that was killed left of its last is cut
    off, as is what a full disk took of this one.
    """
    line = (json.dumps(record) + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b", buffering=0) as file:
            whole = _whole(file)
            file.truncate(whole)
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(whole)
                raise
    except OSError as error:
        print(f"traffic of step {record['step']} is not in {path}: {error}", file=sys.stderr)


def _whole(file: Any, block: int = 1 << 16) -> int:
    """Bytes of `file` up to the end of its last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - block)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, or of the folder that holds it, in order of steps.

    A job that begins at a step, resumed or anew, takes the place of all that was recorded from
    that step on. A last line that is cut off (the job was killed in it) is left out. Raises
    EfaError, also where two jobs wrote in turns.
    """
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EfaError(f"{path} cannot be read: {error}") from error
    records: list[dict[str, Any]] = []
    jobs: list[Any] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            _check(record)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError) and records:
                break
            raise EfaError(f"{path}, line {number} is not one {_MEANT}") from error
        if (job := record.get("job")) not in jobs[-1:]:
            if job in jobs:
                raise EfaError(
                    f"{path}, line {number}: two jobs wrote to this file in turns: give each an "
                    "--efa-traffic-dir of its own"
                )
            jobs.append(job)
        while records and records[-1]["step"] >= record["step"]:
            records.pop()
        records.append(record)
    if not records:
        raise EfaError(f"{path} has no step in it: the run ended before the first was recorded")
    return records


def _check(record: dict[str, Any]) -> None:
    """Raise ValueError, KeyError or TypeError for what is no record."""
    for name in ("step", "ranks"):
        if type(record[name]) is not int or record[name] < 1:
            raise ValueError(name)
    numbers = [record["seconds"], record["exposed"], *record["sent_by_node"]]
    for row in record["rows"]:
        if not isinstance(row["axis"], str) or not isinstance(row["tier"], str):
            raise TypeError("axis")
        numbers += [*(row[name] for name in _ADDED), row["exposed_rank"]]
        numbers += [row[name] for name in _RATES if row[name] is not None]
    for number in numbers:
        finite(number)


def finite(number: Any) -> float:
    """Return `number`; raises ValueError or TypeError unless it is one, finite, and 0 or more."""
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{number} is not a finite number of 0 or more")
    return number


def middle(records: list[dict[str, Any]], after: int, path: Path) -> dict[str, Any]:
    """One record with the medians over those of `records` that are of steps after `after` and of
    as many ranks as the last. An axis that a step did not use sent nothing in it. Raises EfaError.
    """
    later = [record for record in records if record["step"] > after]
    if not later:
        raise EfaError(f"{path}: its last step is {records[-1]['step']}, none is after {after}")
    last = later[-1]
    used = [record for record in later if record["ranks"] == last["ranks"]]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in used:
        for row in record["rows"]:
            rows.setdefault((row["axis"], row["tier"]), []).append(row)
    merged = []
    for _, found in sorted(rows.items()):
        row = {**found[-1], "exposed_rank": statistics.mode(r["exposed_rank"] for r in found)}
        nothing = [0.0] * (len(used) - len(found))
        for name in _ADDED:
            row[name] = statistics.median([*(each[name] for each in found), *nothing])
        for name in _RATES:
            known = [each[name] for each in found if each[name] is not None]
            row[name] = statistics.median(known) if known else None
        if any(row[name] for name in _ADDED):
            merged.append(row)
    whole = {name: statistics.median(r[name] for r in used) for name in ("seconds", "exposed")}
    sent = zip(*(record["sent_by_node"] for record in used), strict=False)
    return {
        **last,
        **whole,
        "rows": merged,
        "sent_by_node": [statistics.median(of_node) for of_node in sent],
        "first": used[0]["step"],
        "steps": len(used),
        "left_out": len(later) - len(used),
    }


def comparison(a: dict[str, Any], b: dict[str, Any]) -> str:
    """How the second run differs from the first, axis by axis: second over first, of a GPU."""

    def per_gpu(name: str) -> list[dict[tuple[str, str], float]]:
        return [
            {
                (row["axis"], row["tier"]): row[name] / (run["ranks"] if name in _SUMS else 1)
                for row in run["rows"]
            }
            for run in (b, a)
        ]

    of = f" of {b['ranks']} over one of {a['ranks']}" if a["ranks"] != b["ranks"] else ""
    lines = [
        f"the second over the first, a GPU{of}: step {_over(b['seconds'], a['seconds'])}, "
        f"waited {_over(b['exposed'], a['exposed'])}",
        f"{'axis':>12} {'tier':>6} {'bytes':>9} {'messages':>9} {'in flight':>10} {'waited':>9}",
    ]
    for key in sorted({key for side in per_gpu("bytes") for key in side}):
        cells = [
            _over(*(side.get(key, 0.0) for side in per_gpu(name)))
            for name in ("bytes", "messages", "seconds", "exposed")
        ]
        lines.append(
            f"{key[0]:>12} {key[1]:>6} {cells[0]:>9} {cells[1]:>9} {cells[2]:>10} {cells[3]:>9}"
        )
    return "\n".join(lines)


def _over(second: float, first: float) -> str:
    if not first:
        return "-" if not second else "new"
    return f"{second / first:.3g}x"
