"""Compare the planner's activations with the bytes that real forward passes save, on CPUs.

    tools/measure_activations.py                       a grid of small models, module by module
    tools/measure_activations.py --json FILE.json      and write the figures

Needs the fork laid out (`megatron-efa fork sync`); no GPU. Takes a minute.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.efa.errors import EfaError
from megatron.efa.planner import activations, grid, saved, write


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every model of the grid; 1 if one is off by more than 5 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="models whose name this pattern finds")
    parser.add_argument("--json", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    names = [name for name in grid.GRID if re.search(args.only, name)]
    try:
        saved.preload()
        if not names:
            raise EfaError(f"--only {args.only}: no model of the grid has such a name")
        records = [_record(name) for name in names]
        if args.json:
            lines = ",\n".join(json.dumps(record) for record in records)
            write.text(args.json, f"[\n{lines}\n]\n")
    except EfaError as error:
        print(f"measure_activations.py: {error}", file=sys.stderr)
        return error.exit_code
    worst = max(records, key=lambda record: abs(record["error"]))
    print(f"largest error: {worst['error']:+.1%} ({worst['model']})")
    return int(abs(worst["error"]) > grid.TOLERANCE)


def _record(name: str) -> dict:
    ranks, flags = grid.GRID[name]
    seen = saved.measure([*grid.MODEL, *flags], ranks)
    token = seen.job.tokens
    parts = []
    for module in activations.MODULES:
        measured, predicted = seen.measured[module] / token, seen.predicted[module] / token
        if measured or predicted:
            parts.append(f"{module} {predicted:.0f}/{measured:.0f}")
    total = sum(seen.measured.values())
    print(
        f"{name}: {total / token:.0f} bytes a token, {seen.error:+.2%}: {', '.join(parts)}",
        flush=True,
    )
    return {
        "model": name,
        "ranks": ranks,
        "flags": flags,
        "measured_bytes": seen.measured,
        "predicted_bytes": {k: round(v) for k, v in seen.predicted.items()},
        "error": seen.error,
    }


if __name__ == "__main__":
    sys.exit(main())
