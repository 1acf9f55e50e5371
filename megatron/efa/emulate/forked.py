"""Ranks forked from this process into the nodes of an emulated cluster, without torchrun.

Importing PyTorch and Megatron costs a process some ten seconds of a CPU. Ranks that are forks of
one process which has imported them share that cost: a benchmark can start them anew each round.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.efa.emulate import description, job, kernel, placement
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.output import LogFollower, tail
from megatron.efa.emulate.rank import log_file
from megatron.efa.errors import EfaError

_POLL_S = 0.02


def run_forked(
    cluster: EmulatedCluster,
    ranks_per_node: int,
    work: Callable[[], Any],
    logs: Path,
    *,
    gpus: Sequence[str] | None = None,
    timeout_s: float = 600,
    follower: LogFollower | None = None,
) -> list[Any]:
    """Run `work()` on every rank and return what each returned (pickled), in rank order.

    A rank sees the environment that torchrun would give it there (RANK, LOCAL_RANK, MASTER_ADDR,
    ...), and writes to `logs`/rankR.log. This process must run no other thread and must not have
    touched a GPU. Raises EfaError, with all ranks ended, if one fails or `timeout_s` pass.
    """
    logs.mkdir(parents=True, exist_ok=True)
    results = Path(tempfile.mkdtemp(prefix="results-", dir=cluster.state))
    world = len(cluster.nodes) * ranks_per_node
    environments = _environments(cluster, ranks_per_node, gpus)
    running: dict[int, int] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for rank, environment in enumerate(environments):
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                _be_rank(cluster, rank // ranks_per_node, rank, parent, environment, work,
                         log_file(logs, rank), results / str(rank))  # fmt: skip
            running[pid] = rank
        _wait(running, logs, timeout_s, follower)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)  # and with it the rank, by the death of its parent
            os.waitpid(pid, 0)
        if follower is not None:
            follower.poll(final=True)
    return [pickle.loads((results / str(rank)).read_bytes()) for rank in range(world)]


def _environments(
    cluster: EmulatedCluster, ranks_per_node: int, gpus: Sequence[str] | None
) -> list[dict[str, str]]:
    nodes = len(cluster.nodes)
    shares = [None] * nodes if gpus is None else placement.share(gpus, nodes, ranks_per_node)
    port = str(job.free_port())
    described = description.write(cluster, ranks_per_node)
    made = []
    for node in cluster.nodes:
        base = placement.of_node(
            os.environ,
            node.hostname,
            cluster.interface,
            cluster.name,
            shares[node.index],
            described,
        )
        for local in range(ranks_per_node):
            rank = node.index * ranks_per_node + local
            base |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "GROUP_RANK": str(node.index),
                "WORLD_SIZE": str(nodes * ranks_per_node),
                "LOCAL_WORLD_SIZE": str(ranks_per_node),
                "MASTER_ADDR": cluster.nodes[0].address,
                "MASTER_PORT": port,
            }
            made.append(placement.of_rank(base, rank, local))
    return made


def _wait(
    running: dict[int, int], logs: Path, timeout_s: float, follower: LogFollower | None
) -> None:
    """Wait until all ranks have ended well; whoever has ended is no longer in `running`."""
    deadline = time.monotonic() + timeout_s
    while running:
        for pid in list(running):  # one by one: the cluster's own helpers are children as well
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
                if code:
                    log = log_file(logs, rank)
                    raise EfaError(f"rank {rank} ended with code {code}, see {log}:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise EfaError(
                f"ranks {sorted(running.values())} did not end within {timeout_s:.0f} s and were "
                f"stopped: see the logs in {logs}"
            )
        if follower is not None:
            follower.poll()
        time.sleep(_POLL_S)


def _be_rank(
    cluster: EmulatedCluster,
    node: int,
    rank: int,
    parent: int,
    environment: Mapping[str, str],
    work: Callable[[], Any],
    log: Path,
    result: Path,
) -> None:
    """Run one rank in this forked process, or in a child of it inside the node; never returns."""
    status = 1
    try:
        kernel.die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()  # Ctrl-C is for the emulator alone
        isolated = cluster.isolated
        cluster.move_into(node)
        if isolated and (child := os.fork()):
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256)
        if isolated:
            kernel.die_with_parent()
        _write_to(log)
        os.environ.clear()
        os.environ.update(environment)
        result.write_bytes(pickle.dumps(work()))
        status = 0
    except EfaError as error:
        print(error, file=sys.stderr)
        status = error.exit_code
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _write_to(log: Path) -> None:
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in (1, 2))
