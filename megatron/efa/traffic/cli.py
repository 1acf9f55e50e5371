"""`megatron-efa traffic`: a run's traffic as a table and a figure, beside another run's.

FILE is the traffic.jsonl of a run (`--efa-traffic-dir`) or the folder that holds it; or a
trace-stepN folder, which becomes one file for Perfetto.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.efa.errors import EfaError
from megatron.efa.traffic import trace
from megatron.efa.traffic.report import FILE, table

_VALUES = ("bytes", "messages", "seconds", "exposed", "exposed_max", "gbps", "of_line")
_MEANT = 'of `megatron-efa traffic`\'s: a line of "step", "ranks", "rows", ...'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa traffic`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="traffic.jsonl, its folder, or a "
                        "trace-stepN folder")  # fmt: skip
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER", help="a run to compare")
    parser.add_argument(
        "--after", type=int, default=0, metavar="STEP", help="leave out steps up to this one"
    )
    parser.add_argument("--png", type=Path, metavar="OUT", help="draw bars per axis and tier")
    parser.add_argument(
        "--out", type=Path, metavar="OUT", help="where a joined trace goes (default: FILE.json)"
    )
    parser.add_argument("--json", action="store_true", help="print the medians as JSON")


def run(args: argparse.Namespace) -> int:
    """Print, draw or join what `args` name; raises EfaError for a file that is not of ours."""
    if args.file.is_dir() and not (args.file / FILE).exists():
        if args.other or args.png or args.json:
            raise EfaError(f"{args.file} holds no {FILE}: a trace is joined, nothing else")
        out = args.out or args.file.with_name(f"{args.file.name}.json")
        joined = trace.join(args.file)
        _aside(out, lambda aside: aside.write_text(json.dumps(joined)))
        print(f"{out}: {len(joined['traceEvents'])} events; open it in ui.perfetto.dev")
        return 0
    runs = [(path, middle(read(path), args.after, path)) for path in _given(args)]
    if args.json:
        print(json.dumps([{"file": str(path), **run} for path, run in runs], indent=1))
    else:
        for path, run in runs:
            print(f"{path}: median of {run['steps']} steps\n{table(run)}\n")
        if len(runs) == 2:
            print(comparison(runs[0][1], runs[1][1]))
    if args.png is not None:
        figure = draw(
            [(path.parent.name if path.name == FILE else path.name, run) for path, run in runs]
        )
        _aside(args.png, lambda aside: figure.savefig(aside, dpi=130, format="png"))
        print(f"figure: {args.png}", file=sys.stderr if args.json else sys.stdout)
    return 0


def _given(args: argparse.Namespace) -> list[Path]:
    return [args.file] if args.other is None else [args.file, args.other]


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, the latest of each step (a resumed run repeats some), in order.

    A last line that is cut off (the job was killed in it) is left out. Raises EfaError.
    """
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EfaError(f"{path} cannot be read: {error}") from error
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            for row in record["rows"]:
                _ = row["axis"], row["tier"], [row[name] for name in (*_VALUES, "exposed_rank")]
            _ = record["seconds"], record["exposed"], record["ranks"]
            records[int(record["step"])] = record
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError) and records:
                break
            raise EfaError(f"{path}, line {number} is not one {_MEANT}") from error
    if not records:
        raise EfaError(f"{path} has no step in it: the run ended before the first was recorded")
    return [records[step] for step in sorted(records)]


def middle(records: list[dict[str, Any]], after: int, path: Path) -> dict[str, Any]:
    """One record with the medians over `records` of the steps after `after`. Raises EfaError."""
    used = [record for record in records if record["step"] > after]
    if not used:
        raise EfaError(f"{path}: its last step is {records[-1]['step']}, none is after {after}")
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in used:
        for row in record["rows"]:
            rows.setdefault((row["axis"], row["tier"]), []).append(row)
    merged = []
    for _, found in sorted(rows.items()):
        row = {**found[-1]}
        for name in _VALUES:
            known = [each[name] for each in found if each[name] is not None]
            row[name] = statistics.median(known) if known else None
        merged.append(row)
    whole = {name: statistics.median(r[name] for r in used) for name in ("seconds", "exposed")}
    return {**used[-1], **whole, "rows": merged, "steps": len(used)}


def comparison(a: dict[str, Any], b: dict[str, Any]) -> str:
    """How the second run differs from the first, axis by axis: second over first."""
    rows = [{(row["axis"], row["tier"]): row for row in run["rows"]} for run in (a, b)]
    lines = [
        f"the second over the first: step {_over(b['seconds'], a['seconds'])}, "
        f"waited {_over(b['exposed'], a['exposed'])}",
        f"{'axis':>12} {'tier':>6} {'bytes':>9} {'messages':>9} {'in flight':>10} {'waited':>9}",
    ]
    for key in sorted(set(rows[0]) | set(rows[1])):
        first, second = (side.get(key) for side in rows)
        cells = [
            _over(*(0.0 if row is None else row[name] for row in (second, first)))
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


def draw(runs: list[tuple[str, dict[str, Any]]]) -> Any:
    """A figure of bytes and of times in flight and waited, bars by axis and tier, runs side by
    side. Raises EfaError without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise EfaError("--png needs matplotlib: pip install 'megatron-efa[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = sorted({(row["axis"], row["tier"]) for _, run in runs for row in run["rows"]})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 1.6 + 0.22 * len(keys) * len(runs)))
    height = 0.8 / len(runs)
    for index, (name, run) in enumerate(runs):
        rows = {(row["axis"], row["tier"]): row for row in run["rows"]}
        at = [place + index * height for place in range(len(keys))]
        found = [rows.get(key) for key in keys]
        sizes = [0.0 if row is None else row["bytes"] / run["ranks"] / 1e6 for row in found]
        left.barh(at, sizes, height, label=name)
        flying = [0.0 if row is None else 1e3 * row["seconds"] for row in found]
        waited = [0.0 if row is None else 1e3 * row["exposed"] for row in found]
        (bars,) = right.barh(at, flying, height, alpha=0.45, label=f"{name}: in flight")[:1] or (
            None,
        )
        color = None if bars is None else bars.get_facecolor()[:3]
        right.barh(at, waited, height / 2, color=color, label=f"{name}: waited")
    for axes, title in ((left, "MB that a GPU sends in a step"), (right, "ms of a step")):
        axes.set_yticks(
            [place + 0.4 - height / 2 for place in range(len(keys))],
            [f"{axis}, {tier}" for axis, tier in keys],
        )
        axes.invert_yaxis()
        axes.set_xlabel(title)
        axes.legend(fontsize="small")
    figure.tight_layout()
    return figure


def _aside(path: Path, write: Callable[[Path], object]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise EfaError(f"{path} cannot be written: {error.strerror}") from error
