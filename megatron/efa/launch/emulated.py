"""One attempt on an emulated cluster: python -m megatron.efa.launch.emulated RUN ATTEMPT."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from megatron.efa.cluster import describe
from megatron.efa.cluster.place_cli import write_hosts
from megatron.efa.emulate import description, kernel, placement
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.job import free_port
from megatron.efa.emulate.network import IsolationRefused
from megatron.efa.emulate.rate import parse_rate
from megatron.efa.errors import EfaError
from megatron.efa.launch import record
from megatron.efa.launch.job import Job


def render(job: Job) -> dict[str, str]:
    """The script of the run: the loop of every target, with emulated nodes as its step."""
    from megatron.efa.launch.script import header, loop

    parse_rate(job.launch.emulated.rate)  # says now what is wrong with it
    step = [
        "step() {",
        '    "$python" -m megatron.efa.launch.emulated "$run" "$1"',
        "}",
        "requeue() { return 1; }",
    ]
    lines = ["#!/bin/bash", *header(job, sys.executable), *step, "", loop()]
    return {"job.sh": "\n".join(lines)}


def run(folder: Path, attempt: int) -> int:
    """Start a launcher on each node, wait for all; returns 0 if all did well, else 1."""
    launched = record.read(folder)
    rate = parse_rate(launched["rate"])
    try:
        return _attempt(EmulatedCluster(launched["nodes"], rate), launched, folder, attempt)
    except IsolationRefused as refusal:
        print(f"megatron-efa: {refusal}: nodes are plain local processes", file=sys.stderr)
        plain = EmulatedCluster(launched["nodes"], isolated=False)
        return _attempt(plain, launched, folder, attempt)


def _attempt(cluster: EmulatedCluster, launched: dict, folder: Path, attempt: int) -> int:
    with cluster:
        ranks = launched["ranks_per_node"]
        described = description.described(cluster, ranks)
        place = folder / "attempts" / str(attempt)
        describe.write(described, place / "cluster.yaml")
        write_hosts(place / "hosts", described)
        path = place / "cluster.yaml"
        shared = {"MEGATRON_EFA_MASTER_ADDR": cluster.nodes[0].address}
        if not cluster.isolated:
            shared["MEGATRON_EFA_MASTER_PORT"] = str(free_port())
        launchers: list[subprocess.Popen] = []
        for node in cluster.nodes:
            env = placement.of_node(
                os.environ, node.hostname, cluster.interface, cluster.name, None, path
            )
            command = [sys.executable, "-m", "megatron.efa.launch.node", str(folder)]
            command += ["--attempt", str(attempt)]
            launchers.append(
                cluster.popen(node.index, command, env=env | shared, stdin=subprocess.DEVNULL)
            )
        return int(any([launcher.wait() for launcher in launchers]))


def main() -> int:
    """Run the attempt; SIGTERM ends the nodes with it."""
    kernel.die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(Path(sys.argv[1]), int(sys.argv[2]))
    except EfaError as error:
        print(f"megatron-efa: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
