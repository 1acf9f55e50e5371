"""`megatron-efa fork`: lay out, verify, export and rebase the patched upstream."""

import argparse
import time
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands; the checkout is the one this file lies in."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    sync = commands.add_parser("sync", help="lay the pinned release and the series out")
    sync.add_argument("--wheel", type=Path, metavar="FILE", help="take the release from this wheel")
    sync.add_argument("--from", dest="directory", type=Path, metavar="DIR", help="... or directory")
    sync.add_argument("--force", action="store_true", help="discard edits in the tree")
    verify = commands.add_parser("verify", help="is the tree exactly base + series?")
    verify.add_argument("--full", action="store_true", help="hash every file, trust no stat")
    commands.add_parser("status", help="base, series, budget and state of the tree")
    export = commands.add_parser("export", help="turn edits in the tree into the series")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--new", metavar="TITLE", help="new patch for lines beside no patch")
    which.add_argument("--into", type=int, metavar="NNNN", help="patch for lines beside no patch")
    which.add_argument("--drop", type=int, metavar="NNNN", help="take a patch out of the series")
    rebase = commands.add_parser("rebase", help="move the series to another release")
    what = rebase.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", metavar="VERSION", help="release to move to")
    what.add_argument(
        "--continue", dest="go_on", action="store_true", help="conflicts are resolved"
    )
    what.add_argument("--abort", action="store_true", help="forget the rebase; nothing has changed")
    rebase.add_argument("--from", dest="directory", type=Path, metavar="DIR", help="wheels to use")


def run(args: argparse.Namespace, layout: Layout | None = None) -> int:
    """Run one action and print what it did; `EfaError` goes to the caller."""
    layout = layout or Layout.of_this_checkout()
    print(_ACTIONS[args.action](args, layout))
    return 0


# The rooms' modules are imported where they are used: `verify` should not load an archive reader.
def _sync(args: argparse.Namespace, layout: Layout) -> str:
    from megatron.efa.fork.sync import sync

    if args.wheel and args.directory:
        raise EfaError("--wheel and --from exclude each other: give one of them")
    return sync(layout, wheel=args.wheel, directory=args.directory, force=args.force)


def _verify(args: argparse.Namespace, layout: Layout) -> str:
    from megatron.efa.fork.verify import verify

    begin = time.perf_counter()
    verify(layout, full=args.full)
    took = (time.perf_counter() - begin) * 1000
    return f"megatron/ is exactly base + series, and what Python imports ({took:.0f} ms)"


def _status(args: argparse.Namespace, layout: Layout) -> str:
    from megatron.efa.fork.status import status

    return status(layout)


def _export(args: argparse.Namespace, layout: Layout) -> str:
    from megatron.efa.fork.export import drop, export
    from megatron.efa.fork.sync import sync

    if args.drop is not None:
        return f"wrote {', '.join(drop(layout, args.drop))}; {sync(layout)}"
    names = export(layout, new=args.new, into=args.into)
    if not names:
        return "nothing to do: the series makes this very tree"
    fill = "; fill in its header" if args.new else ""
    return f"wrote {', '.join(names)}{fill}"


def _rebase(args: argparse.Namespace, layout: Layout) -> str:
    from megatron.efa.fork import rebase

    if args.abort:
        return rebase.abort(layout)
    if args.go_on:
        return rebase.go_on(layout)
    return rebase.start(layout, args.to, directory=args.directory)


_ACTIONS = {
    "sync": _sync,
    "verify": _verify,
    "status": _status,
    "export": _export,
    "rebase": _rebase,
}
