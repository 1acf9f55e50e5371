"""`megatron-efa traffic`: a run's traffic as a table and a figure, beside another run's.

FILE is the traffic.jsonl of a run (`--efa-traffic-dir`) or the folder that holds it; or a
trace-stepN folder, which becomes one file for Perfetto.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.efa.errors import EfaError
from megatron.efa.traffic import trace
from megatron.efa.traffic.report import table
from megatron.efa.traffic.runs import FILE, comparison, middle, read


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
        if args.other or args.png or args.json or args.after:
            raise EfaError(f"{args.file} holds no {FILE}: a trace is joined, nothing else")
        out = args.out or args.file.with_name(f"{args.file.name}.json")
        joined = trace.join(args.file)
        _aside(out, lambda aside: aside.write_text(json.dumps(joined)))
        print(f"{out}: {len(joined['traceEvents'])} events; open it in ui.perfetto.dev")
        if missing := joined["otherData"]["missing"]:
            print(f"{args.file} has nothing of {len(missing)} ranks: {missing}", file=sys.stderr)
        return 0
    if args.out:
        raise EfaError(f"--out {args.out} is for a trace-stepN folder, and {args.file} is none")
    runs = [(path, middle(read(path), args.after, path)) for path in _given(args)]
    if args.json:
        print(json.dumps([{"file": str(path), **run} for path, run in runs], indent=1))
    else:
        for path, run in runs:
            others = f" ({run['left_out']} of other numbers of ranks left out)"
            print(
                f"{path}: median of {run['steps']} steps{others if run['left_out'] else ''}\n"
                f"{table(run)}\n"
            )
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
