"""Train scaled-down twins of configs for a few steps on two emulated nodes of two CPU ranks.

    tools/train_twins.py                              # every config of examples/trillion
    tools/train_twins.py examples/trillion/kimi-k2-p5en.yaml --write DIR

A twin takes the code path of its config in small sizes (megatron/efa/planner/twin.py). One process
imports Megatron and forks the ranks of each job. Without root the nodes are names only.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.efa.bench import step_rank, step_records
from megatron.efa.config.compose import EXAMPLES
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.forked import run_forked
from megatron.efa.emulate.network import IsolationRefused
from megatron.efa.emulate.rate import parse_rate
from megatron.efa.errors import EfaError
from megatron.efa.planner import twin, write


def main(argv: Sequence[str] | None = None) -> int:
    """Train the twins; return the exit code."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("configs", nargs="*", type=Path)
    p.add_argument("--rate", default="1gbit", help="of each node's link")
    p.add_argument("--write", type=Path, metavar="DIR", help="keep the twins' configs")
    args = p.parse_args(argv)
    configs = args.configs or sorted((EXAMPLES / "trillion").glob("*.yaml"))
    try:
        with tempfile.TemporaryDirectory(prefix="twins-") as scratch:
            folder = args.write or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            files = [folder / config.name for config in configs]
            for config, file in zip(configs, files, strict=True):
                write.text(file, twin.text(config))
            _train(files, args.rate, Path(scratch) / "logs")
    except EfaError as error:
        print(f"train_twins.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _train(files: Sequence[Path], rate: str, logs: Path) -> None:
    step_rank.preload(gpu=False)
    try:
        cluster = EmulatedCluster(2, parse_rate(rate))
        _each(cluster, files, logs)
    except IsolationRefused as refusal:
        print(f"train_twins.py: {refusal}: nodes are names only", file=sys.stderr)
        _each(EmulatedCluster(2, isolated=False), files, logs)


def _each(cluster: EmulatedCluster, files: Sequence[Path], logs: Path) -> None:
    with cluster:
        for file in files:
            flags = ["--config", str(file.resolve())]
            ranks = run_forked(
                cluster,
                twin.RANKS // 2,
                lambda flags=flags: step_rank.train(flags, cluster.isolated, False),
                logs / file.stem,
                timeout_s=300,
            )
            losses = step_records.losses(ranks)
            if len(losses) != twin.STEPS or not all(map(math.isfinite, losses)):
                raise EfaError(f"the twin of {file.name} did not train: losses {losses}")
            sent = step_records.step_bytes(ranks, 1)
            crossed = "" if sent is None else f", {sent / 1e6:.2f} MB a step between nodes"
            said = ", ".join(f"{loss:.4f}" for loss in losses)
            print(f"{file.stem}: losses {said}{crossed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
