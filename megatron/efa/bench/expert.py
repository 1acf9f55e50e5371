"""`megatron-efa bench expert`: one expert layer's dispatch and combine, upstream's beside ours.

Both run forward and backward in turns, in one process group of an emulated cluster, on the same
tokens, routing and expert weights, and must agree. docs/bench.md says what is measured.
"""

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.efa.bench import report
from megatron.efa.errors import EfaError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa bench expert`."""
    option = parser.add_argument
    option("--shapes", default="2x4,4x2", help="NODESxRANKS a node, several (default: 2x4,4x2)")
    option("--rate", default="100mbit", help="rate of each node's link (default: 100mbit)")
    option("--layers", default="deepseek-v3", help="deepseek-v3, kimi-k2 (default: deepseek-v3)")
    option(
        "--routing",
        default="uniform",
        help="uniform, balanced, skewed, node-limited, or files that `bench step "
        "--record-routing` wrote (default: uniform)",
    )
    option("--hidden", type=int, default=2048, help="hidden size (default: 2048)")
    option("--tokens", type=int, default=256, help="tokens of each rank (default: 256)")
    option("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the tokens")
    option(
        "--dispatchers",
        default="alltoall,hierarchical",
        help="alltoall, allgather, hierarchical (default: alltoall,hierarchical)",
    )
    option(
        "--chunks",
        default="0",
        help="chunks of the hierarchical dispatcher, several; 0: its own choice (default: 0)",
    )
    option("--rounds", type=int, default=5, help="turns of each dispatcher (default: 5)")
    option("--gpu", action="store_true", help="NCCL on this machine's GPUs, shared by the ranks")
    option(
        "--profile",
        action="store_true",
        help="one more turn of each, recorded: when rails and nodes are busy at once, and on GPUs "
        "a trace of rank 0's streams",
    )
    option("--timeout", type=float, default=1800, help="seconds that one shape may take")
    option("--out", type=Path, help="folder of records, figure and logs (default: runs/bench/...)")


def run(args: argparse.Namespace) -> int:
    """Measure every shape; returns 0. Raises EfaError if two dispatchers disagree."""
    shapes = [_shape(word) for word in args.shapes.split(",")]
    for name in ("hidden", "tokens", "rounds"):
        if getattr(args, name) < 1:
            raise EfaError(f"--{name} {getattr(args, name)} is not 1 or more")
    out = report.Folder(args.out, "expert")
    _preload(args.gpu)
    from megatron.efa.bench import dispatchers, expert_records

    arms = dispatchers.arms(args.dispatchers.split(","), _integers(args.chunks))
    cases = _cases(args)
    for (nodes, per_node), case in itertools.product(shapes, cases):
        if case.layer.experts % (nodes * per_node):
            raise EfaError(
                f"{case.layer.experts} experts of {case.layer.name} do not divide among "
                f"{nodes}x{per_node} ranks: give other --shapes"
            )
    records = []
    for nodes, per_node in shapes:
        records += _measure(args, nodes, per_node, cases, arms, out)
        out.write_records(records, rate=args.rate)  # also if a later shape fails
    print(expert_records.table(records))
    print(f"records: {out.write_records(records, rate=args.rate)}")
    figure = out.write_figure(lambda pyplot: expert_records.draw(pyplot, records))
    print("" if figure is None else f"figure:  {figure}")
    return 0


def _shape(word: str) -> tuple[int, int]:
    nodes, _, ranks = word.partition("x")
    if not (nodes.isdecimal() and ranks.isdecimal() and int(nodes) and int(ranks)):
        raise EfaError(f"--shapes: '{word}' is no shape: write 2x4 for 2 nodes of 4 ranks")
    return int(nodes), int(ranks)


def _integers(text: str) -> list[int]:
    if not all(word.isdecimal() for word in text.split(",")):
        raise EfaError(f"--chunks {text}: give numbers like 1,2,4")
    return [int(word) for word in text.split(",")]


def _preload(gpu: bool) -> None:
    """Import what ranks need before they are forked. Nothing here may touch a GPU."""
    from megatron.efa import cpu
    from megatron.efa.fork import verify_at_start

    verify_at_start()
    if not gpu:
        cpu.enable()
    import megatron.core.transformer.moe.moe_layer  # noqa: F401


def _cases(args: argparse.Namespace) -> list[Any]:
    from megatron.efa.bench import routing
    from megatron.efa.bench.expert_rank import Case

    cases = []
    sizes = (args.hidden, args.tokens, args.dtype)
    layers = args.layers.split(",")
    for name in layers:
        if name not in routing.LAYERS:
            raise EfaError(f"--layers: there is no {name}, but {', '.join(routing.LAYERS)}")
    for kind in args.routing.split(","):
        if kind in routing.KINDS:
            cases += [Case(routing.LAYERS[name], kind, None, *sizes) for name in layers]
        else:
            recorded = routing.load(Path(kind))
            cases.append(Case(recorded.layer, "recorded", recorded, *sizes))
    return cases


def _measure(
    args: argparse.Namespace,
    nodes: int,
    per_node: int,
    cases: Sequence[Any],
    arms: Sequence[Any],
    out: report.Folder,
) -> list[dict[str, Any]]:
    """Records of one shape."""
    from megatron.efa.bench.expert_rank import measure
    from megatron.efa.bench.expert_records import records_of
    from megatron.efa.emulate import placement
    from megatron.efa.emulate.cluster import EmulatedCluster
    from megatron.efa.emulate.forked import run_forked
    from megatron.efa.emulate.network import IsolationRefused
    from megatron.efa.emulate.output import LogFollower
    from megatron.efa.emulate.rank import log_file
    from megatron.efa.emulate.rate import parse_rate

    backend = "nccl" if args.gpu else "gloo"
    rate, gpus = parse_rate(args.rate), placement.visible_gpus() if args.gpu else None
    logs = out.path / f"logs-{nodes}x{per_node}"
    profile = out.path / f"profile-{nodes}x{per_node}" if args.profile else None
    meet = multiprocessing.get_context("fork").Barrier(nodes * per_node, timeout=args.timeout)

    def on(cluster: EmulatedCluster) -> list[dict[str, Any]]:
        with cluster:
            follower = LogFollower({log_file(logs, 0): f"{nodes}x{per_node}: "})
            seen = run_forked(
                cluster,
                per_node,
                lambda: measure(
                    cases, arms, args.rounds, nodes, args.gpu, cluster.isolated, meet, profile
                ),
                logs,
                gpus=gpus,
                timeout_s=args.timeout,
                follower=follower,
            )
            speed = None if cluster.rate is None else cluster.rate.bytes_per_second
        near = min(rate for rate, _ in seen)
        records = []
        for index, case in enumerate(cases):
            of_case = [cases[index] for _, cases in seen]
            records += records_of(case, nodes, per_node, speed, near, of_case, backend)
        return records

    try:
        return on(EmulatedCluster(nodes, rate))
    except IsolationRefused as refusal:
        print(f"megatron-efa: {refusal}: links are neither shaped nor counted", file=sys.stderr)
        return on(EmulatedCluster(nodes, isolated=False))
