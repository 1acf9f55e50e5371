"""Before an attempt, once, in the job: which host gets which ranks.

    python -m megatron.efa.launch.hosts RUN ATTEMPT

Hosts that were there in the attempt before keep their ranks.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from megatron.efa.cluster import describe
from megatron.efa.cluster.discover import discover
from megatron.efa.cluster.discover.slurm import expand
from megatron.efa.cluster.model import Cluster
from megatron.efa.cluster.place import place
from megatron.efa.cluster.place_cli import read_hosts, write_hosts
from megatron.efa.cluster.traffic import Sizes
from megatron.efa.config.compose import compose
from megatron.efa.errors import EfaError
from megatron.efa.launch import record


def choose(run: Path, attempt: int, allocated: list[str]) -> str:
    """Write `hosts` and `cluster.yaml` of the attempt; returns a line on the order.

    `allocated` are the hosts of the job; empty: all that the cluster's description has. Raises
    EfaError if the description lacks one of them.
    """
    launched = record.read(run)
    folder = run / "attempts" / str(attempt)
    described = run / "cluster.yaml"
    source = str(described) if described.is_file() else launched["source"] or "slurm"
    cluster = _of_job(discover(source, launched["kind"]), allocated, launched["nodes"])
    nodes = tuple(replace(node, gpus=launched["ranks_per_node"]) for node in cluster.nodes)
    cluster = replace(cluster, nodes=nodes)
    before = run / "attempts" / str(attempt - 1) / "hosts"
    previous = read_hosts(before) if before.is_file() else None
    if previous is not None and len(previous) != len(nodes):
        previous = None
    sizes = Sizes.of({s.key: s.value for s in compose(str(run / "config.yaml"))})
    placed = place(cluster, sizes, previous)
    describe.write(placed.after, folder / "cluster.yaml")
    write_hosts(folder / "hosts", placed.after)  # last: its presence says that both are there
    return placed.summary()


def _of_job(cluster: Cluster, allocated: list[str], nodes: int) -> Cluster:
    known = {node.name: node for node in (*cluster.nodes, *cluster.spares)}
    names = allocated or [node.name for node in cluster.nodes][:nodes]
    missing = [name for name in names if name not in known]
    if missing:
        raise EfaError(
            f"{cluster.source} does not have {missing[0]}, which the job was given: describe it, "
            "or leave launch.cluster out"
        )
    return replace(cluster, nodes=tuple(known[name] for name in names), spares=())


def main() -> int:
    """Do it; one line on stderr if it cannot be done."""
    run, attempt = Path(sys.argv[1]), int(sys.argv[2])
    allocated = expand(os.environ.get("SLURM_JOB_NODELIST", ""))
    try:
        print(choose(run, attempt, allocated), flush=True)
    except EfaError as error:
        print(f"megatron-efa: {error}", file=sys.stderr)
        (run / "attempts" / str(attempt) / f"failed-code-{error.exit_code}-placement").touch()
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
