"""`megatron-efa logs RUN`: what a rank printed, by default the last one, which prints losses."""

import argparse
from collections import deque
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.launch import progress, record
from megatron.efa.launch.status_cli import folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="folder of the run, or its name in runs/launch")
    parser.add_argument("--rank", type=int, help="default: the last")
    parser.add_argument("--attempt", type=int, help="default: the last")
    parser.add_argument("--lines", type=int, default=40, help="at most, 0: all (default: 40)")
    parser.add_argument("--errors", action="store_true", help="standard error instead of output")


def run(args: argparse.Namespace) -> int:
    """Print; returns 0. Raises EfaError."""
    path = folder(args.run)
    launched = record.read(path)
    file = find(path, launched["ranks_per_node"], args.rank, args.attempt, args.errors)
    print(f"==> {file}")
    with file.open(errors="replace") as lines:
        for line in deque(lines, args.lines) if args.lines else lines:
            print(line, end="")
    return 0


def find(run: Path, ranks: int, rank: int | None, attempt: int | None, errors: bool) -> Path:
    """The log of a rank in an attempt; None: the last. Raises EfaError if there is none."""
    attempts = {int(f.name): f for f in progress.attempts_of(run)}
    if not attempts:
        raise EfaError(f"{run} has no logs yet: the job has not started")
    number = max(attempts) if attempt is None else attempt
    if number not in attempts:
        raise EfaError(f"--attempt {number}: {run} has attempts 1 to {max(attempts)}")
    found = progress.logs(attempts[number], "stderr" if errors else "stdout")
    if not found:
        raise EfaError(f"{attempts[number]} has no logs: its ranks did not start")
    place = max(found) if rank is None else divmod(rank, ranks)
    if place not in found:
        raise EfaError(
            f"--rank {rank}: attempt {number} has logs of {len(found)} ranks, and not of this one"
        )
    return found[place]
