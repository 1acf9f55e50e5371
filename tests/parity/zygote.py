"""A process that has imported torch and Megatron once and forks the ranks of each job.

    python -m tests.parity.zygote [--plain]

Reads one JSON job a line from stdin, answers one JSON line on stdout. PYTHONPATH says which tree
of Megatron it serves; --plain says that the tree is upstream's own, whose wheel has no Makefile for
the call that compiles the dataset helpers at every start.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from megatron.efa import cpu


def preload(plain):
    cpu.enable()
    # Imported when first used, by optimizers and by any tokenizer: seconds for each rank.
    import torch._dynamo  # noqa: F401

    import megatron.core.tokenizers.text
    import tests.parity.entry
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # The process that collects the results of checkpoint writers need not import torch again.
    filesystem_async.get_write_results_queue.__wrapped__.__defaults__ = ("fork",)
    if plain:
        import megatron.core.datasets.utils

        megatron.core.datasets.utils.compile_helpers = lambda: None
    return tests.parity.entry


def record_steps(steps):
    """Append what every training step returns to `steps`, floats in hexadecimal: no bit is lost.

    The printed losses will not do: the second one is the mean of the first two steps.
    """
    from megatron.training import training

    train_step = training.train_step

    def recorded(*args, **kwargs):
        start = time.perf_counter()
        result = train_step(*args, **kwargs)
        losses, skipped, _, _, _, grad_norm = result[:6]
        steps.append(
            {
                "losses": {name: float(value).hex() for name, value in losses.items()},
                "grad_norm": None if grad_norm is None else float(grad_norm).hex(),
                "skipped": int(skipped),
                "seconds": time.perf_counter() - start,
            }
        )
        return result

    training.train_step = recorded


def be_on(hosts, node, per_node):
    """Let this process be on a host of its own in a network: `hosts` is [name, path] a node."""
    from megatron.efa.cluster import current
    from megatron.efa.cluster.model import Cluster, Node

    nodes = (Node(name, per_node, tuple(path)) for name, path in hosts)
    current.use(Cluster(tuple(nodes), source="test"))
    socket.gethostname = lambda: hosts[node][0]


def run_rank(entry, job, rank, out):
    """Train one rank in this (forked) process and never return."""
    status, steps = 1, []
    os.setsid()  # so that processes it starts can be ended with it
    try:
        with open(out / f"rank{rank}.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in (1, 2))
        per_node = job.get("per_node", job["ranks"])
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_node),
            "WORLD_SIZE": str(job["ranks"]),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(job["port"]),
        }
        if "hosts" in job:
            be_on(job["hosts"], rank // per_node, per_node)
        sys.argv = ["entry.py", *job["argv"]]
        record_steps(steps)
        entry.train()
        status = 0
    except SystemExit as exit_:
        status = exit_.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        # By the rank that it trained as, which placement may have changed.
        (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(steps))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def run_job(entry, job):
    """Fork the ranks, wait for them, end all once one has failed. Returns their exit codes."""
    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    gc.freeze()
    pids, groups = {}, []
    for rank in range(job["ranks"]):
        pid = os.fork()
        if pid == 0:
            run_rank(entry, job, rank, out)
        pids[pid] = rank
        groups.append(pid)
    codes, deadline = {}, time.monotonic() + job["timeout"]
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() > deadline:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in list(pids):
                os.waitpid(pid, 0)
                codes.setdefault(pids.pop(pid), "ended")
        time.sleep(0.01)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return [codes[rank] for rank in range(job["ranks"])]


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever an import prints must not be taken for an answer
    entry = preload("--plain" in sys.argv)
    print("ready", file=answers)
    for line in sys.stdin:
        print(json.dumps(run_job(entry, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
