"""Fit the planner's time model to published steps, or evaluate it on a file of steps.

    tools/fit_planner.py                         cross-validate by (model, GPU) and report; write
    nothing
    tools/fit_planner.py --write                 the same, then write the constants fitted to all
    rows
    tools/fit_planner.py --hold model            leave whole models (or `gpu`) out instead
    tools/fit_planner.py --evaluate FILE.csv     predict every row of any file with those columns
    tools/fit_planner.py --memory                published peaks of memory beside the planner's

Errors are |predicted / measured - 1| of the step's time. `--json` prints median_abs_error,
p90_abs_error, rows and not_predicted instead.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.efa.errors import EfaError
from megatron.efa.planner import constants, fit, peaks, published, report


def parser() -> argparse.ArgumentParser:
    """The tool's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--evaluate", type=Path, metavar="FILE.csv", help="predict this file's rows")
    p.add_argument("--data", type=Path, default=constants.PUBLISHED, help="rows to fit")
    p.add_argument("--hold", choices=("group", "model", "gpu"), default="group")
    p.add_argument("--write", action="store_true", help="write the constants fitted to all rows")
    p.add_argument("--memory", action="store_true", help="compare published peaks of memory")
    p.add_argument("--json", action="store_true", help="print the summary as JSON alone")
    p.add_argument("--rows", action="store_true", help="print each row when cross-validating too")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit code."""
    args = parser().parse_args(argv)
    try:
        if args.memory:
            print(peaks.table(peaks.peaks(published.read(args.data))))
            return 0
        return _evaluate(args) if args.evaluate else _fit(args)
    except EfaError as error:
        print(f"fit_planner.py: {error}", file=sys.stderr)
        return error.exit_code


def _evaluate(args: argparse.Namespace) -> int:
    rows = report.sort_rows(published.read(args.evaluate))
    predicted = fit.predict(fit.table(rows.runs), constants.logs()) if rows.runs else []
    _tell(args, rows, predicted, each=True)
    return 0


def _fit(args: argparse.Namespace) -> int:
    rows = report.sort_rows(published.read(args.data))
    if not rows.runs:
        raise EfaError(f"{args.data}: no row that the planner can predict, so nothing to fit")
    predicted, logs = fit.cross_validate(rows.runs, args.hold)
    _tell(args, rows, predicted, each=args.rows)
    if args.write:
        constants.save(fit.constants(logs))
    return 0


def _tell(
    args: argparse.Namespace, rows: report.Rows, predicted: Sequence[float], each: bool
) -> None:
    if args.json:
        print(json.dumps(report.summary(rows, predicted)))
        return
    if each:
        print(report.table(rows, predicted), end="\n\n")
    print(report.digest(rows, predicted))
    if rows.refused:
        print(f"{len(rows.refused)} of {len(rows.runs) + len(rows.refused)} rows not predicted")


if __name__ == "__main__":
    sys.exit(main())
