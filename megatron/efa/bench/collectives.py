"""`megatron-efa bench collectives`: each collective flat and on two levels, in turns.

Both run in one process group of an emulated cluster, on the same tensors, and must agree.
docs/collectives.md says what is measured.
"""

import argparse
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

from megatron.efa.bench import report
from megatron.efa.errors import EfaError

_UNITS = {"k": 1 << 10, "m": 1 << 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa bench collectives`."""
    option = parser.add_argument
    option("--shapes", default="2x4,4x2,8x1", help="NODESxRANKS a node (default: 2x4,4x2,8x1)")
    option("--rate", default="200mbit", help="rate of each node's link (default: 200mbit)")
    option(
        "--sizes",
        default="32k,256k,1m,4m,16m",
        help="bytes of the whole message, with k or m (default: 32k,256k,1m,4m,16m)",
    )
    option(
        "--collectives",
        default="all_reduce,reduce_scatter,all_gather",
        help="also all_to_all, broadcast (default: all_reduce,reduce_scatter,all_gather)",
    )
    option("--dtype", choices=("bf16", "fp32"), default="fp32", help="of the tensors")
    option("--rounds", type=int, default=5, help="turns of each arm (default: 5)")
    option("--gpu", action="store_true", help="NCCL on this machine's GPUs, shared by the ranks")
    option("--timeout", type=float, default=1800, help="seconds that one shape may take")
    option("--out", type=Path, help="folder of records, figure and logs (default: runs/bench/...)")


def run(args: argparse.Namespace) -> int:
    """Measure every shape; returns 0. Raises EfaError if the two arms disagree."""
    shapes = [_shape(word) for word in args.shapes.split(",")]
    sizes = [_size(word) for word in args.sizes.split(",")]
    if args.rounds < 1:
        raise EfaError(f"--rounds {args.rounds} is not 1 or more")
    out = report.Folder(args.out, "collectives")
    from megatron.efa.bench.collectives_rank import Case, check_names
    from megatron.efa.bench.collectives_records import draw, table

    names = args.collectives.split(",")
    check_names(names)
    cases = [Case(name, size, args.dtype) for name in names for size in sizes]
    records: list[dict[str, Any]] = []
    for nodes, per_node in shapes:
        records += _measure(args, nodes, per_node, cases, out)
        out.write_records(records, rate=args.rate)  # also if a later shape fails
    print(table(records))
    print(f"records: {out.write_records(records, rate=args.rate)}")
    figure = out.write_figure(lambda pyplot: draw(pyplot, records))
    print("" if figure is None else f"figure:  {figure}")
    return 0


def _shape(word: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
    if not found:
        raise EfaError(f"--shapes: '{word}' is no shape: write 2x4 for 2 nodes of 4 ranks")
    return int(found[1]), int(found[2])


def _size(word: str) -> int:
    found = re.fullmatch(r"([1-9]\d*)([km]?)", word.lower())
    if not found:
        raise EfaError(f"--sizes: '{word}' is no size: write bytes, or 256k, or 64m")
    return int(found[1]) * _UNITS.get(found[2], 1)


def _measure(
    args: argparse.Namespace, nodes: int, per_node: int, cases: list[Any], out: report.Folder
) -> list[dict[str, Any]]:
    """Records of one shape."""
    from megatron.efa.bench.collectives_rank import measure
    from megatron.efa.bench.collectives_records import records_of
    from megatron.efa.emulate import placement
    from megatron.efa.emulate.cluster import EmulatedCluster
    from megatron.efa.emulate.forked import run_forked
    from megatron.efa.emulate.network import IsolationRefused
    from megatron.efa.emulate.output import LogFollower
    from megatron.efa.emulate.rank import log_file
    from megatron.efa.emulate.rate import parse_rate

    rate, gpus = parse_rate(args.rate), placement.visible_gpus() if args.gpu else None
    logs = out.path / f"logs-{nodes}x{per_node}"
    meet = multiprocessing.get_context("fork").Barrier(nodes * per_node, timeout=args.timeout)

    def on(cluster: EmulatedCluster) -> list[dict[str, Any]]:
        with cluster:
            speed = None if cluster.rate is None else cluster.rate.bytes_per_second
            seen = run_forked(
                cluster,
                per_node,
                lambda: measure(cases, args.rounds, per_node, speed, args.gpu, meet),
                logs,
                gpus=gpus,
                timeout_s=args.timeout,
                follower=LogFollower({log_file(logs, 0): f"{nodes}x{per_node}: "}),
            )
        backend = "nccl" if args.gpu else "gloo"
        return records_of(cases, nodes, per_node, speed, seen, backend)

    try:
        return on(EmulatedCluster(nodes, rate))
    except IsolationRefused as refusal:
        print(f"megatron-efa: {refusal}: links are neither shaped nor counted", file=sys.stderr)
        return on(EmulatedCluster(nodes, isolated=False))
