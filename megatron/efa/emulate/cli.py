"""`megatron-efa emulate --nodes 2 --ranks-per-node 2 --rate 1gbit -- pretrain_gpt.py ...`"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.efa.emulate import job as jobs
from megatron.efa.emulate import placement, report
from megatron.efa.emulate.cluster import EmulatedCluster, default_name
from megatron.efa.emulate.network import IsolationRefused
from megatron.efa.emulate.output import LogFollower, tail
from megatron.efa.emulate.rank import log_file
from megatron.efa.emulate.rate import parse_rate
from megatron.efa.errors import EfaError

_MOST_RANKS = 64


class _Stopped(BaseException):
    """A signal asked the emulator to end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa emulate`."""
    parser.add_argument("--nodes", type=int, default=2, help="nodes of the cluster (default: 2)")
    parser.add_argument("--ranks-per-node", type=int, default=2, help="ranks a node (default: 2)")
    parser.add_argument(
        "--rate",
        default="1gbit",
        help="rate of each node's link each way, like 500mbit, 10gbit or none (default: 1gbit)",
    )
    parser.add_argument(
        "--gpu", action="store_true", help="share this machine's GPUs among the ranks"
    )
    parser.add_argument("--name", help="name of the cluster (default: the time and process id)")
    parser.add_argument(
        "--log-dir", type=Path, help="where each rank's output goes (default: runs/emulate/NAME)"
    )
    parser.add_argument(
        "--show",
        default="0,last",
        help="ranks whose output is shown: numbers, last, all or none (default: 0,last)",
    )
    parser.add_argument(
        "--timeout", type=float, help="end the job after so many seconds, with code 124"
    )
    parser.add_argument("--json", type=Path, help="write traffic, times and outcome to this file")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="-- a script or -m module, and its arguments"
    )


def run(args: argparse.Namespace) -> int:
    """Run the job on an emulated cluster; returns its exit code (130 or 143 after a signal)."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    jobs.check_command(command)
    if not 1 <= args.ranks_per_node <= _MOST_RANKS:
        raise EfaError(f"--ranks-per-node {args.ranks_per_node} is not from 1 to {_MOST_RANKS}")
    if args.timeout is not None and not args.timeout >= 0:  # nan is not either
        raise EfaError(f"--timeout {args.timeout:g} is no time to wait: give seconds")
    name = default_name() if args.name is None else args.name
    cluster = EmulatedCluster(args.nodes, parse_rate(args.rate), name=name)
    shown = shown_ranks(args.show, args.nodes * args.ranks_per_node)
    logs = Path("runs") / "emulate" / name if args.log_dir is None else args.log_dir
    gpus = placement.visible_gpus() if args.gpu else None
    _check_outputs(logs, args.json)
    job = jobs.Job(command, args.ranks_per_node, logs, gpus, args.timeout)
    labelled = args.show not in ("0,last", "0", "last")
    follower = LogFollower(
        {log_file(logs, rank): f"rank {rank}: " if labelled else "" for rank in shown}
    )
    received: list[int] = []
    try:
        with _stoppable(received):
            try:
                return _emulate(args, cluster, job, follower)
            except IsolationRefused as refusal:
                print(
                    f"megatron-efa: {refusal}: running the ranks as plain local processes over "
                    "loopback, with unshaped and uncounted links",
                    file=sys.stderr,
                )
                plain = EmulatedCluster(args.nodes, name=name, isolated=False)
                return _emulate(args, plain, job, follower)
    except _Stopped:
        print(f"megatron-efa: stopped by {signal.Signals(received[0]).name}", file=sys.stderr)
        return 128 + received[0]
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _emulate(
    args: argparse.Namespace, cluster: EmulatedCluster, job: jobs.Job, follower: LogFollower
) -> int:
    with cluster:
        outcome = jobs.run_job(cluster, job, follower)
        print(report.table(cluster, outcome))
        print(f"logs: {job.logs}", flush=True)
        if args.json is not None:
            report.write_json(args.json, report.as_json(cluster, args.ranks_per_node, outcome))
    if outcome.failure is not None:
        if outcome.failure.log not in follower.paths:
            print(tail(outcome.failure.log), file=sys.stderr)
        print(f"megatron-efa: {outcome.failure}", file=sys.stderr)
    elif outcome.exit_code == jobs.TIMED_OUT:
        print(
            f"megatron-efa: the job did not end within --timeout {args.timeout:g} s and was "
            f"stopped: see the logs in {job.logs}",
            file=sys.stderr,
        )
    return outcome.exit_code


@contextlib.contextmanager
def _stoppable(received: list[int]) -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into `_Stopped`; later ones change nothing."""

    def stop(number: int, _: object) -> None:
        received.append(number)
        if len(received) == 1:
            raise _Stopped

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if (
        signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ):  # `nohup`: the end of a terminal is not ours
        numbers = numbers[:2]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def shown_ranks(text: str, world: int) -> list[int]:
    """Ranks that `--show` names, in order and once each; EfaError if one does not exist."""
    if text == "none":
        return []
    if text == "all":
        return list(range(world))
    ranks = set()
    for word in text.split(","):
        rank = str(world - 1) if word == "last" else word
        if not rank.isdecimal() or int(rank) >= world:
            raise EfaError(
                f"--show {text}: '{word}' is no rank of 0 to {world - 1}; give numbers, last, all "
                "or none"
            )
        ranks.add(int(rank))
    return sorted(ranks)


def _check_outputs(logs: Path, summary: Path | None) -> None:
    """EfaError now rather than after the run if logs or the JSON file cannot be written."""
    if summary is not None:
        report.check_writable(summary)
    if logs.resolve().is_relative_to("/dev/shm"):
        raise EfaError(
            f"--log-dir {logs} is in /dev/shm, which each node has for itself: choose another"
        )
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EfaError(f"--log-dir {logs} cannot be made: {error.strerror}") from error
    if not os.access(logs, os.W_OK | os.X_OK):
        raise EfaError(f"--log-dir {logs} is not writable: choose another")
