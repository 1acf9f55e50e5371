"""`megatron-efa bench startup`: making the process groups of a job, upstream's way and ours.

On emulated nodes every way is measured in turns, in the same processes, from before
`initialize_model_parallel` until all ranks are through it. Views of large jobs come from single
ranks on fake process groups: what a rank itself computes, without waiting for any other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron.efa.emulate import job as jobs
from megatron.efa.emulate import report
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.network import IsolationRefused
from megatron.efa.emulate.output import tail
from megatron.efa.emulate.rate import parse_rate
from megatron.efa.errors import EfaError

RANK = "megatron.efa.bench.startup_rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa bench startup`."""
    option = parser.add_argument
    option("--shapes", default="2x4,4x2", help="NODESxRANKS a node, several (default: 2x4,4x2)")
    option("--rate", default="1gbit", help="rate of each node's link (default: 1gbit)")
    option("--tp", type=int, default=1, help="tensor-parallel size (default: 1)")
    option("--pp", type=int, default=2, help="pipeline-parallel size (default: 2)")
    option("--ep", type=int, default=4, help="expert-parallel size (default: 4)")
    option("--rounds", type=int, default=7, help="turns of each way (default: 7)")
    option(
        "--views",
        default="512,1024,2048",
        help="world sizes of which one rank's view is made, '' for none (default: 512,1024,2048)",
    )
    option("--timeout", type=float, default=600, help="seconds that one shape may take")
    option("--json", type=Path, help="write all figures to this file")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns 0. Raises EfaError for a job that fails."""
    shapes = [_shape(word) for word in args.shapes.split(",") if word]
    worlds = [_world(word) for word in args.views.split(",") if word]
    if args.rounds < 1:
        raise EfaError(f"--rounds {args.rounds} is not 1 or more")
    records: list[dict[str, Any]] = []
    if shapes:
        print("making all groups, median and range of seconds")
        print(f"{'cluster':10}{'way':40}{'groups':>7}{'seconds':>9}   range")
    for nodes, per_node in shapes:
        for record in _emulated(args, nodes, per_node):
            records.append({"nodes": nodes, "ranks_per_node": per_node, **record})
            low, high = record["range"]
            print(
                f"{f'{nodes}x{per_node}':10}{record['way']:40}{record['groups']:7}"
                f"{record['seconds']:9.3f}   {low:.3f}-{high:.3f}",
                flush=True,
            )
    if worlds:
        print("one rank's view on fake process groups, PP8 EP64, 8 ranks a node")
        print(f"{'ranks':10}{'way':40}{'groups':>7}{'seconds':>9}{'MiB':>7}")
    for world in worlds:
        for record in _viewed(world, args.rounds):
            records.append({"world": world, **record})
            print(
                f"{world:<10}{record['way']:40}{record['groups']:7}{record['seconds']:9.3f}"
                f"{record['mib']:7.0f}",
                flush=True,
            )
    if args.json is not None:
        report.write_json(args.json, {"startup": records})
    return 0


def _shape(word: str) -> tuple[int, int]:
    nodes, _, ranks = word.partition("x")
    if not (nodes.isdecimal() and ranks.isdecimal() and int(nodes) and int(ranks)):
        raise EfaError(f"--shapes: '{word}' is no shape: write 2x4 for 2 nodes of 4 ranks")
    return int(nodes), int(ranks)


def _world(word: str) -> int:
    if not word.isdecimal() or not int(word) or int(word) % 512:
        raise EfaError(f"--views: '{word}' is no multiple of 512, which PP8 x EP64 needs")
    return int(word)


def _emulated(args: argparse.Namespace, nodes: int, per_node: int) -> list[dict[str, Any]]:
    sizes = ["--tp", str(args.tp), "--pp", str(args.pp), "--ep", str(args.ep)]
    with tempfile.TemporaryDirectory(prefix="efa-startup-") as scratch:
        result, logs = Path(scratch) / "result.json", Path(scratch) / "logs"
        words = ["-m", RANK, *sizes, "--rounds", str(args.rounds), "--out", str(result)]
        job = jobs.Job(words, per_node, logs, timeout_s=args.timeout)
        try:
            with EmulatedCluster(nodes, parse_rate(args.rate)) as cluster:
                outcome = jobs.run_job(cluster, job)
        except IsolationRefused as refusal:
            print(f"megatron-efa: {refusal}: over loopback instead", file=sys.stderr)
            with EmulatedCluster(nodes, isolated=False) as cluster:
                outcome = jobs.run_job(cluster, job)
        if outcome.failure is not None:
            print(tail(outcome.failure.log), file=sys.stderr)
            raise EfaError(f"the job of {nodes}x{per_node} ranks failed: {outcome.failure}")
        if outcome.exit_code:
            raise EfaError(
                f"the job of {nodes}x{per_node} ranks did not end within --timeout "
                f"{args.timeout:g} s"
            )
        return json.loads(result.read_text())


def _viewed(world: int, rounds: int) -> list[dict[str, Any]]:
    words = [sys.executable, "-m", RANK, "--view", str(world), "--rounds", str(rounds)]
    with tempfile.TemporaryDirectory(prefix="efa-startup-") as scratch:
        result = Path(scratch) / "result.json"
        done = subprocess.run([*words, "--out", str(result)], capture_output=True, text=True)
        if done.returncode:
            raise EfaError(f"the view of {world} ranks failed: {done.stderr.strip()[-500:]}")
        return json.loads(result.read_text())
