"""`megatron-efa topology ACTION`: see, write down and use what is known of a cluster's network."""

import argparse
from pathlib import Path

from megatron.efa.cluster import describe, place_cli, show
from megatron.efa.cluster.discover import FORMS, discover
from megatron.efa.errors import EfaError

ACTIONS = {
    "show": "switches, nodes and ranks as a tree",
    "discover": "write the description that every rank of a job reads",
    "place": "the order of hosts in which heavy traffic stays near",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument(
            "--from",
            dest="origin",
            metavar="SOURCE",
            help=f"{FORMS} (default: MEGATRON_EFA_CLUSTER, else torchrun's variables)",
        )
        action.add_argument("--kind", default="", help="kind of the nodes, where SOURCE has none")
        if name == "place":
            place_cli.add_arguments(action)
        if name == "show":
            action.add_argument("--json", action="store_true", help="print JSON")
            action.add_argument("--svg", type=Path, help="draw the tree to this file")
        if name == "discover":
            action.add_argument(
                "-o", "--out", type=Path, help="file to write (default: standard output)"
            )


def run(args: argparse.Namespace) -> int:
    """Do it; returns 0. Raises EfaError."""
    cluster = discover(args.origin, args.kind)
    if args.action == "place":
        return place_cli.run(args, cluster)
    if args.action == "discover":
        if args.out is None:
            print(describe.text_of(cluster), end="")
        else:
            describe.write(cluster, args.out)
            print(f"{args.out}: {show.summary(cluster)}")
        return 0
    if args.svg is not None:
        try:
            args.svg.write_text(show.as_svg(cluster))
        except OSError as error:
            raise EfaError(f"cannot draw to {args.svg}: {error.strerror}") from error
    print(show.as_json(cluster) if args.json else show.as_text(cluster))
    return 0
