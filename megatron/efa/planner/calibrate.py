"""`megatron-efa calibrate`: measure a cluster and write the YAML that the planner reads.

torchrun ... -m megatron.efa calibrate -o cluster.yaml            # on the cluster at hand
megatron-efa calibrate --emulate --nodes 4 --ranks-per-node 2 --rate 100mbit -o cluster.yaml
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.efa.cluster import current, describe
from megatron.efa.cluster.model import Cluster
from megatron.efa.errors import EfaError
from megatron.efa.planner.calibrate_rank import Sweep, measure

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    option = parser.add_argument
    option("-o", "--out", type=Path, required=True, metavar="FILE.yaml", help="file to write")
    option("--efa-cluster", metavar="FILE", help="the cluster's description, to which is added")
    option("--sizes", help="bytes that a rank sends in a call (16k,256k,4m; more on GPUs)")
    option("--precision", default=None, help="of the GEMMs: fp32, bf16, or both, with a comma")
    option("--emulate", action="store_true", help="measure an emulated cluster, on CPUs")
    option("--nodes", type=int, default=2, help="nodes to emulate (default: 2)")
    option("--ranks-per-node", type=int, default=2, help="ranks of each (default: 2)")
    option("--rate", default="1gbit", help="of each emulated node's link (default: 1gbit)")
    option("--timeout", type=float, default=600, help="seconds that the emulated sweep may take")


def run(args: argparse.Namespace) -> int:
    """Measure and write; return the exit code."""
    if importlib.util.find_spec("torch") is None:
        raise EfaError("calibrate needs PyTorch: pip install 'megatron-efa[torch]'")
    if args.out.suffix not in (".yaml", ".yml"):
        raise EfaError(f"--out {args.out}: the name of a cluster's description ends in .yaml")
    if args.emulate:
        cluster = emulated(args)
    elif "RANK" in os.environ:
        cluster = at_hand(args)
    else:
        raise EfaError(
            "calibrate measures a running job: start it with `torchrun ... -m megatron.efa "
            "calibrate`, a process a GPU, or give --emulate"
        )
    if cluster is not None:
        describe.write(cluster, args.out)
        print(f"cluster: {args.out}")
    return 0


def sweep_of(args: argparse.Namespace, on_cpus: bool) -> Sweep:
    """What to measure. Raises EfaError for sizes or precisions that are none."""
    words = (args.sizes or ("16k,256k,2m" if on_cpus else "64k,1m,16m,128m")).lower().split(",")
    try:
        sizes = tuple(int(w.rstrip("kmg")) * _UNITS[w[-1] if w[-1] in "kmg" else ""] for w in words)
    except (ValueError, IndexError):
        raise EfaError(f"--sizes {args.sizes}: write bytes, like 16k,256k,4m") from None
    if not all(size > 0 for size in sizes):
        raise EfaError(f"--sizes {args.sizes}: must be above zero")
    precisions = tuple((args.precision or ("fp32" if on_cpus else "bf16")).split(","))
    if set(precisions) - {"fp32", "bf16"}:
        raise EfaError(f"--precision {args.precision}: takes fp32, bf16 or both")
    return Sweep(tuple(sorted(set(sizes))), precisions)


def at_hand(args: argparse.Namespace) -> Cluster | None:
    """The cluster of this torchrun job with what was measured; None on all ranks but the first."""
    import torch

    from megatron.efa import cpu

    on_cpus = not torch.cuda.is_available()
    sweep = sweep_of(args, on_cpus)
    if on_cpus:
        preload()
    else:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.efa_cluster:
        os.environ[current.VARIABLE] = os.path.abspath(args.efa_cluster)
    torch.distributed.init_process_group("gloo" if cpu.enabled() else "nccl")
    base, rank = current.current(), torch.distributed.get_rank()
    try:
        if args.efa_cluster:
            current.check(base, rank, torch.distributed.get_world_size())
        found = calibrated(base, sweep)
    finally:
        torch.distributed.destroy_process_group()
    return found if rank == 0 else None


def emulated(args: argparse.Namespace) -> Cluster:
    """An emulated cluster with what was measured on it. Raises EfaError where it has no links."""
    from megatron.efa.emulate import description
    from megatron.efa.emulate.cluster import EmulatedCluster
    from megatron.efa.emulate.forked import run_forked
    from megatron.efa.emulate.network import IsolationRefused
    from megatron.efa.emulate.rate import parse_rate

    sweep = sweep_of(args, on_cpus=True)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sweep = replace(sweep, memory_bytes=float(memory // (args.nodes * args.ranks_per_node)))
    preload()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="calibrate-") as logs,
            EmulatedCluster(args.nodes, parse_rate(args.rate)) as cluster,
        ):
            base = description.described(cluster, args.ranks_per_node)
            results = run_forked(
                cluster, args.ranks_per_node, _in_fork(base, sweep), Path(logs),
                timeout_s=args.timeout,
            )  # fmt: skip
    except IsolationRefused as refusal:
        raise EfaError(f"{refusal}: without links there is nothing to calibrate") from refusal
    return replace(results[0], source=f"emulated cluster, {args.rate} a node")


def _in_fork(base: Cluster, sweep: Sweep) -> Callable[[], Any]:
    def work() -> Cluster:
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        try:
            return calibrated(base, sweep)
        finally:
            torch.distributed.destroy_process_group()

    return work


def calibrated(base: Cluster, sweep: Sweep) -> Cluster:
    """`base` with the links and rates that all its ranks measure together."""
    current.use(base)
    near, far, compute = measure(sweep)
    return replace(base, near=near or base.near, far=far or base.far, compute=compute)


def preload() -> None:
    """Import what ranks need, redirected to CPUs, so that forks need not."""
    from megatron.efa.planner import saved

    sys.stdout.flush()
    saved.preload()
