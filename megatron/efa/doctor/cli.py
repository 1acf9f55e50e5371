"""`megatron-efa doctor`: check a login node, a node, or all nodes of a job before it starts."""

import argparse
import os
import sys
from pathlib import Path

from megatron.efa.cluster.current import VARIABLE
from megatron.efa.cluster.discover import FORMS, discover
from megatron.efa.cluster.model import Cluster
from megatron.efa.config.nearest import hint
from megatron.efa.doctor import context, gather, job, report
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import checks
from megatron.efa.errors import EfaError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--config", metavar="FILE", help="the job's config, as for pretrain_gpt.py")
    parser.add_argument("--kind", default="", help="kind of node that the job is for (catalogue)")
    parser.add_argument("--nodes", type=int, help="number of nodes that the job is for")
    parser.add_argument("--from", dest="origin", metavar="SOURCE", help=f"the cluster: {FORMS}")
    parser.add_argument(
        "--log", type=Path, action="append", default=[], metavar="FILE",
        help="log of a run with NCCL_DEBUG=INFO, to see what NCCL selected",
    )  # fmt: skip
    parser.add_argument("--only", default="", metavar="ID,ID", help="run these checks alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all", action="store_true", help="a line for each check that was well")
    parser.add_argument("--list", action="store_true", help="list the checks and end")
    job.add_arguments(parser)
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help="for the config")


def run(args: argparse.Namespace) -> int:
    """Check, print, and return 0 (well), 1 (warnings) or 3 (failures). Raises EfaError."""
    known = checks()
    if args.list:
        for one in known:
            covers = f" ({', '.join(one.covers)})" if one.covers else ""
            print(f"{one.id:20} {one.title}{covers}")
        for name, title in job.CHECKS.items():
            print(f"{name:20} {title}")
        return 0
    only = [name for name in args.only.split(",") if name]
    _check_names(only, [*(one.id for one in known), *job.CHECKS])
    for path in args.log:
        if not path.is_file():
            raise EfaError(f"--log {path}: there is no such file: give the output of a run")
    told = context.read(
        args.config,
        args.overrides,
        kind=args.kind,
        nodes=args.nodes,
        cluster=_cluster(args),
        logs=args.log,
    )
    outcome = job.examine(Host(), told, args, only)
    if outcome.quiet:  # the head prints
        return outcome.code or 0
    if args.json:
        print(report.as_json(outcome.findings, outcome.title))
    else:
        print(report.as_text(outcome.findings, outcome.title, outcome.nodes, every=args.all))
    sys.stdout.flush()
    return report.exit_code(outcome.findings)


def _cluster(args: argparse.Namespace) -> Cluster | None:
    """The description, where one is named; nothing is discovered unasked."""
    if args.origin:
        here = gather.place(os.environ)
        asked = Path(args.origin).suffix not in (".yaml", ".yml")
        if asked and here is not None and here.rank:
            return None  # an API is asked once, by the head
        return discover(args.origin, args.kind)
    return discover(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def _check_names(given: list[str], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise EfaError(f"--only {name}: there is no such check{hint(name, known)}; see --list")
