"""The `megatron-efa` command: one line a subcommand, each in a room of its own.

A room's `cli` module offers `add_arguments(parser)` and `run(args) -> int`. It is imported only
when its subcommand is called: `megatron-efa fork sync` works before there is a fork or a torch.
"""

import argparse
import importlib
import os
import sys

from megatron.efa.errors import EfaError

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "fork": ("megatron.efa.fork.cli", "lay out, verify, export and rebase the patched upstream"),
    "emulate": ("megatron.efa.emulate.cli", "run a training job on an emulated cluster"),
    "topology": ("megatron.efa.cluster.cli", "see, write down and use the cluster's network"),
    "traffic": ("megatron.efa.traffic.cli", "show, draw and compare what training steps sent"),
    "bench": ("megatron.efa.bench.cli", "measure paths beside upstream on an emulated cluster"),
    "plan": ("megatron.efa.planner.cli", "find the fastest layout of a model that fits a cluster"),
    "calibrate": ("megatron.efa.planner.calibrate", "measure a cluster for the planner"),
    "doctor": ("megatron.efa.doctor.cli", "check nodes, software and network before a job"),
    "launch": ("megatron.efa.launch.cli", "render a job for a scheduler, and start it"),
    "status": ("megatron.efa.launch.status_cli", "say how far a launched run has come"),
    "logs": ("megatron.efa.launch.logs_cli", "show what a rank of a launched run printed"),
    "dry-run": ("megatron.efa.planner.dryrun_cli", "build ranks of a real job without its GPUs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run `megatron-efa argv`, return its exit code; EfaError and Ctrl-C are one line on stderr."""
    _open_closed_streams()
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="megatron-efa", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    room = None
    for name, (module, summary) in SUBCOMMANDS.items():
        chosen = bool(argv) and argv[0] == name
        sub = commands.add_parser(name, help=summary, description=summary, add_help=chosen)
        if chosen:
            room = importlib.import_module(module)
            room.add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        return room.run(args)
    except EfaError as error:
        print(f"megatron-efa: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"megatron-efa: {args.command} was stopped by Ctrl-C", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """Open what the shell closed (`>&-`): else the next file or pipe would be our stdout."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            mode = "w" if number else "r"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (takes the lowest number)


if __name__ == "__main__":
    sys.exit(main())
