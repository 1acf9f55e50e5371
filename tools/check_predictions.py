"""Lay the planner's predictions beside measured steps, on an emulated cluster that it calibrates.

    tools/check_predictions.py --rate 100mbit --json FILE.json       # about ten minutes

Calibrates (or takes --calibration FILE.yaml), predicts a step of each layout, and then trains all
of them in turns with `pretrain_gpt.py` on the same emulated nodes. Ends with 1 if a step is off by
more than --tolerance, or if two layouts whose times are apart are predicted in the wrong order.
"""

import argparse
import itertools
import json
import shlex
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.efa.bench import report, step, step_rank, step_records
from megatron.efa.cluster import describe
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.forked import run_forked
from megatron.efa.emulate.rate import parse_rate
from megatron.efa.errors import EfaError
from megatron.efa.planner import calibrate, dryrun, machines, predict, write

_EP = "--expert-model-parallel-size {} --moe-token-dispatcher-type {}"
_TP = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
LAYOUTS = {
    "ep8 alltoall": _EP.format(8, "alltoall"),
    "ep8 hierarchical": _EP.format(8, "hierarchical"),
    "ep4 alltoall": _EP.format(4, "alltoall"),
    "ep4 hierarchical": _EP.format(4, "hierarchical"),
    "ep2 alltoall (inside the nodes)": _EP.format(2, "alltoall"),
    "pp2 ep4 alltoall": f"{_EP.format(4, 'alltoall')} --pipeline-model-parallel-size 2",
    "tp2 ep4 alltoall": f"{_EP.format(4, 'alltoall')} {_TP}",
}
NODES, RANKS = 4, 2
SHARED = shlex.split(
    f"--global-batch-size {2 * NODES * RANKS} --distributed-backend gloo --transformer-impl local "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion "
    "--no-persist-layer-norm --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather"
)
APART = 0.05
"""Two layouts' times are apart if they differ by more than that."""


def parser() -> argparse.ArgumentParser:
    """The tool's command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rate", default="100mbit", help="of each node's link")
    p.add_argument("--calibration", type=Path, metavar="FILE.yaml", help="do not calibrate again")
    p.add_argument("--measured", type=Path, metavar="FILE.json", help="steps of an earlier --json")
    p.add_argument("--steps", type=int, default=3, help="measured steps of a turn")
    p.add_argument("--rounds", type=int, default=2, help="turns of each layout")
    p.add_argument("--tolerance", type=float, default=0.15)
    p.add_argument("--json", type=Path, metavar="FILE.json")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit code."""
    args = parser().parse_args(argv)
    try:
        return _compare(args)
    except EfaError as error:
        print(f"check_predictions.py: {error}", file=sys.stderr)
        return error.exit_code


def _compare(args: Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="predictions-") as folder:
        file = args.calibration or _calibrated(args, Path(folder) / "cluster.yaml")
        said = file.read_text()
        records = _predictions(str(file))
        measured = _earlier(args) if args.measured else _train(args, Path(folder) / "logs")
    for record in records:
        record |= measured[record["layout"]]
        record["error"] = record["predicted_s"] / record["measured_s"] - 1
    wrong = _misordered(records)
    print(_table(records))
    print("order of all that are apart: " + ("; ".join(wrong) or "as measured"))
    if args.json:
        facts = {"rate": args.rate, "machine": report.machine(), "cluster": said}
        if args.measured:
            facts["measured"] = json.loads(args.measured.read_text())["machine"]
        write.text(args.json, json.dumps(facts | {"records": records}, indent=1) + "\n")
    off = [record for record in records if abs(record["error"]) > args.tolerance]
    return int(bool(off or wrong))


def _calibrated(args: Namespace, file: Path) -> Path:
    sweep = Namespace(
        out=file, emulate=True, nodes=NODES, ranks_per_node=RANKS, rate=args.rate, sizes=None,
        precision=None, efa_cluster=None, timeout=900.0,
    )  # fmt: skip
    describe.write(calibrate.emulated(sweep), file)
    return file


def _predictions(file: str) -> list[dict[str, Any]]:
    machine, _ = machines.of_word(file)
    dryrun.start()
    records = []
    for name, flags in LAYOUTS.items():
        words = [*step.MODEL, *step.MADE_UP_DATA, *SHARED, *shlex.split(flags)]
        args = dryrun.parse([*words, "--train-iters", "1"], 0, NODES * RANKS)
        shape, plan = predict.of_args(args, machine)
        records.append(
            {
                "layout": name,
                "flags": flags,
                "predicted_s": plan.seconds,
                "predicted_parts_s": plan.parts,
                "predicted_inter_node_bytes": predict.inter_node_bytes(shape, plan.job, machine),
            }
        )
    return records


def _earlier(args: Namespace) -> dict[str, dict[str, Any]]:
    """What an earlier run measured, by layout."""
    try:
        records = json.loads(args.measured.read_text())["records"]
        kept = {
            r["layout"]: {key: r[key] for key in r if key.startswith("measured_")} for r in records
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EfaError(f"--measured {args.measured}: no records of this tool: {error}") from None
    if missing := [name for name in LAYOUTS if "measured_s" not in kept.get(name, {})]:
        raise EfaError(f"--measured {args.measured}: it has no {missing[0]}")
    return kept


def _train(args: Namespace, logs: Path) -> dict[str, dict[str, Any]]:
    """What every measured step took, and bytes between nodes, by layout."""
    step_rank.preload(gpu=False)
    iterations = ["--train-iters", str(2 + args.steps)]
    seen: dict[str, list[Any]] = {"seconds": [[] for _ in LAYOUTS], "bytes": [0.0] * len(LAYOUTS)}
    with EmulatedCluster(NODES, parse_rate(args.rate)) as cluster:
        for turn, (index, flags) in itertools.product(
            range(args.rounds), enumerate(LAYOUTS.values())
        ):
            print(f"turn {turn + 1} of {args.rounds}: {list(LAYOUTS)[index]}", flush=True)
            words = [*step.MODEL, *step.MADE_UP_DATA, *SHARED, *shlex.split(flags), *iterations]
            ranks = run_forked(
                cluster,
                RANKS,
                lambda words=words: step_rank.train(words, cluster.isolated, False),
                logs,
                timeout_s=900,
            )
            seen["seconds"][index] += step_records.step_seconds(ranks, 2)
            seen["bytes"][index] = step_records.step_bytes(ranks, 2)
    return {
        name: {
            "measured_s": statistics.median(seconds),
            "measured_low_s": min(seconds),
            "measured_high_s": max(seconds),
            "measured_inter_node_bytes": sent,
        }
        for name, seconds, sent in zip(LAYOUTS, seen["seconds"], seen["bytes"], strict=True)
    }


def _misordered(records: list[dict[str, Any]]) -> list[str]:
    """Pairs that are measured apart and predicted the other way round."""
    found = []
    for a, b in itertools.permutations(records, 2):
        apart = a["measured_s"] < b["measured_s"] * (1 - APART)
        if apart and a["predicted_s"] > b["predicted_s"]:
            found.append(f"{a['layout']} is faster than {b['layout']}")
    return found


def _table(records: list[dict[str, Any]]) -> str:
    header = ["layout", "predicted s", "measured s", "error", "MB between nodes", "terms, s"]
    rows = []
    for r in sorted(records, key=lambda record: record["measured_s"]):
        terms = sorted(r["predicted_parts_s"].items(), key=lambda item: -item[1])
        rows.append(
            [r["layout"], f"{r['predicted_s']:.2f}", f"{r['measured_s']:.2f}",
             f"{r['error']:+.1%}",
             f"{r['predicted_inter_node_bytes'] / 1e6:.0f} / "
             f"{r['measured_inter_node_bytes'] / 1e6:.0f}",
             ", ".join(f"{name} {value:.2f}" for name, value in terms if value > 0.1)]
        )  # fmt: skip
    return report.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
