"""A training job on an emulated cluster: torchrun on each node, watched until the end."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron.efa.emulate import description, placement, processes
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.network import LinkCounters
from megatron.efa.emulate.output import LogFollower
from megatron.efa.emulate.rank import log_file
from megatron.efa.errors import EfaError

_MASTER_PORT = 29500
_POLL_S = 0.05
_SETTLE_S = 0.5
_GRACE_S = 5.0
TIMED_OUT = 124


@dataclass(frozen=True)
class Job:
    """What to run: `command` is a script or `-m module`, with its arguments."""

    command: Sequence[str]
    ranks_per_node: int
    logs: Path
    gpus: Sequence[str] | None = None
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True)
class Failure:
    """What failed first; `rank` is None for torchrun itself, `code` negative for a signal."""

    node: int
    rank: int | None
    local_rank: int | None
    code: int
    log: Path

    def __str__(self) -> str:
        who = f"torchrun on node{self.node}"
        if self.rank is not None:
            who = f"rank {self.rank} (node{self.node}, local rank {self.local_rank})"
        how = f"exit code {self.code}"
        if self.code < 0:
            how = f"signal {_signal_name(-self.code)}"
        return f"{who} ended first, with {how}: see {self.log}"


@dataclass(frozen=True)
class Outcome:
    """How a job went: `links` holds each node's traffic, None where nodes have no links."""

    seconds: float
    exit_code: int
    failure: Failure | None
    links: list[LinkCounters] | None


def torchrun_command(
    nodes: int, node: int, ranks_per_node: int, address: str, master_port: int, rank: Sequence[str]
) -> list[str]:
    """torchrun for one node, meeting the others at `address`; `rank` is each rank's command."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node)),
        *("--node-rank", str(node), "--master-addr", address, "--master-port", str(master_port)),
        *("--max-restarts", "0", "--no-python"),
        *rank,
    ]


def run_job(cluster: EmulatedCluster, job: Job, follower: LogFollower | None = None) -> Outcome:
    """Run a job to its end; a rank that fails ends it within seconds.

    Writes `rank<R>.log` and `torchrun-node<N>.log` to `job.logs`, over those of an earlier job.
    Whatever ends this call, the job's ranks have ended when it returns or raises.
    """
    _clear_logs(job.logs, len(cluster.nodes), job.ranks_per_node)
    records = Path(tempfile.mkdtemp(prefix="exits-", dir=cluster.state))
    before = cluster.counters() if cluster.isolated else None
    start = time.monotonic()
    agents: list[subprocess.Popen] = []
    try:
        _start_agents(cluster, job, records, agents)
        code, failure = _watch(agents, records, job, start, follower)
        seconds = time.monotonic() - start
        links = None if before is None else _traffic(cluster, before)
    finally:
        _end(agents)
        if follower is not None:
            follower.poll(final=True)
    return Outcome(seconds, code, failure, links)


def _clear_logs(logs: Path, nodes: int, ranks_per_node: int) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for rank in range(nodes * ranks_per_node):
        log_file(logs, rank).unlink(missing_ok=True)
    for node in range(nodes):
        _agent_log(logs, node).unlink(missing_ok=True)


def _start_agents(
    cluster: EmulatedCluster, job: Job, records: Path, agents: list[subprocess.Popen]
) -> None:
    """Start torchrun on each node, and add each to `agents` as it starts."""
    python = [sys.executable, "-u", *job.command]
    rank = [*processes.helper_command("rank"), str(job.logs.resolve()), str(records), *python]
    port = _MASTER_PORT if cluster.isolated else free_port()
    nodes = len(cluster.nodes)
    gpus: list[list[str] | None] = [None] * nodes
    if job.gpus is not None:
        gpus = placement.share(job.gpus, nodes, job.ranks_per_node)
    described = description.write(cluster, job.ranks_per_node)
    for index, node in enumerate(cluster.nodes):
        address = cluster.nodes[0].address
        command = torchrun_command(nodes, index, job.ranks_per_node, address, port, rank)
        env = placement.of_node(
            job.env, node.hostname, cluster.interface, cluster.name, gpus[index], described
        )
        with open(_agent_log(job.logs, index), "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            agents.append(cluster.popen(index, command, env=env, **streams))


def _traffic(cluster: EmulatedCluster, before: list[LinkCounters]) -> list[LinkCounters] | None:
    """What crossed the links since `before`, or None if a node has ended."""
    try:
        return [now - then for now, then in zip(cluster.counters(), before, strict=True)]
    except EfaError:
        return None


def _watch(
    agents: list[subprocess.Popen],
    records: Path,
    job: Job,
    start: float,
    follower: LogFollower | None,
) -> tuple[int, Failure | None]:
    """Wait for the end of the job or for the first failure; returns exit code and failure."""
    while True:
        if follower is not None:
            follower.poll()
        if _first_failure(agents, records, job.logs) is not None:
            time.sleep(_SETTLE_S)  # another may have failed earlier and be recorded a moment later
            failure = _first_failure(agents, records, job.logs)
            return (failure.code if failure.code > 0 else 128 - failure.code), failure
        if all(agent.poll() == 0 for agent in agents):
            return 0, None
        if job.timeout_s is not None and time.monotonic() - start > job.timeout_s:
            return TIMED_OUT, None
        time.sleep(_POLL_S)


def _first_failure(agents: list[subprocess.Popen], records: Path, logs: Path) -> Failure | None:
    """The rank that failed first, or the torchrun that failed without one."""
    failed = []
    for path in records.glob("*.json"):
        record = json.loads(path.read_text())
        if record["code"] != 0:
            failed.append(record)
    if failed:
        first = min(failed, key=lambda record: record["time"])
        return Failure(
            first["node"],
            first["rank"],
            first["local_rank"],
            first["code"],
            log_file(logs, first["rank"]),
        )
    for node, agent in enumerate(agents):
        if agent.poll() not in (None, 0):
            return Failure(node, None, None, agent.returncode, _agent_log(logs, node))
    return None


def _end(agents: list[subprocess.Popen]) -> None:
    """Ask what still runs to end, and kill what does not."""
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()
    deadline = time.monotonic() + _GRACE_S
    while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for agent in agents:
        if agent.poll() is None:
            agent.kill()  # and with it, each by the death of its parent, torchrun and the ranks
            agent.wait()


def _agent_log(logs: Path, node: int) -> Path:
    return logs / f"torchrun-node{node}.log"


def _signal_name(number: int) -> str:
    """SIGKILL for 9; the number itself where Python has no name for it (real-time signals)."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def free_port() -> int:
    """A port of this host that nothing listens on, and from which no connection is made.

    A rank dials the master before that listens, and Linux may give it, among the ports for outgoing
    connections, the very one it dials: it is then connected to itself, and the port is taken.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(10_000, lowest)
    for port in random.sample(ports, min(len(ports), 100)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def check_command(command: Sequence[str]) -> None:
    """EfaError unless `command` is a script that exists or `-m module`."""
    if not command:
        raise EfaError("there is nothing to run: give a script or -m module after --")
    if command[0] == "-m":
        if len(command) < 2:
            raise EfaError("-m needs the name of a module after it")
    elif not Path(command[0]).is_file():
        raise EfaError(f"there is no script {command[0]} in {os.getcwd()} to run on the nodes")
