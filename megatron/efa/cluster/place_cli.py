"""`megatron-efa topology place`: the order of hosts for a job, for people and for launchers.

Sizes are Megatron's flags, or a config's keys; what neither says is a default of `traffic.Sizes`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.efa import aside
from megatron.efa.cluster.model import Cluster
from megatron.efa.cluster.place import Placement, place
from megatron.efa.cluster.traffic import Sizes
from megatron.efa.errors import EfaError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; where the cluster comes from is declared by the caller."""
    option = parser.add_argument
    option("--config", help="YAML file of the job, as for pretrain_gpt.py")
    option("--previous", type=Path, help="hostfile of an earlier start: who is still there stays")
    option("--hostfile", type=Path, help="write the hosts, in rank order, to this file")
    option("--json", action="store_true", help="print JSON")
    option("overrides", nargs="*", metavar="GROUP.KEY=VALUE", help="as for pretrain_gpt.py")
    sizes = parser.add_argument_group("sizes of the job, Megatron's flags")
    for item in fields(Sizes):
        flag = "--" + item.name.replace("_", "-")
        if item.type is bool:
            sizes.add_argument(flag, action="store_true", default=None)
        else:
            sizes.add_argument(flag, type=int, metavar="N")


def run(args: argparse.Namespace, cluster: Cluster) -> int:
    """Print, and write `--hostfile`; returns 0. Raises EfaError."""
    sizes = sizes_of(args)
    previous = read_hosts(args.previous) if args.previous else None
    placement = place(cluster, sizes, previous)
    if args.hostfile:
        write_hosts(args.hostfile, placement.after)
    print(json.dumps(as_json(placement), indent=1) if args.json else as_text(placement))
    return 0


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Sizes from `--config`, overrides and flags; a flag may not repeat what a config says."""
    given: dict[str, Any] = {}
    if args.config or args.overrides:
        from megatron.efa.config.compose import compose

        given = {s.key: s.value for s in compose(args.config, args.overrides)}
    flags = {item.name: getattr(args, item.name, None) for item in fields(Sizes)}
    return Sizes.of(given | {name: value for name, value in flags.items() if value is not None})


def read_hosts(path: Path) -> list[str]:
    """Host names of a hostfile in its order: the first word of each line that is no comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EfaError(f"cannot read the hostfile {path}: {error}") from error
    words = (line.partition("#")[0].split() for line in lines)
    hosts = [word[0] for word in words if word]
    if not hosts:
        raise EfaError(f"the hostfile {path} names no host: give one a line, in rank order")
    return hosts


def write_hosts(path: Path, cluster: Cluster) -> None:
    """Write a hostfile as mpirun reads it (with `--map-by seq` in the order of the file)."""
    lines = [f"{node.name} slots={node.gpus}\n" for node in cluster.nodes]
    try:
        with aside.beside(path) as made:
            (made / path.name).write_text("".join(lines))
            (made / path.name).replace(path)
    except OSError as error:
        raise EfaError(f"cannot write the hostfile {path}: {error.strerror}") from error


def as_json(placement: Placement) -> dict[str, Any]:
    """What `--json` prints."""
    old, new = placement.totals
    return {
        "hosts": [
            {"name": node.name, "ranks": [ranks.start, ranks.stop - 1], "path": list(node.path)}
            for node, ranks in _with_ranks(placement.after)
        ],
        "moved": placement.moved,
        "byte_hops": {
            axis: {"before": before, "after": after}
            for axis, (before, after) in placement.distances.items()
        }
        | {"total": {"before": old, "after": new}},
        "note": placement.note,
    }


def as_text(placement: Placement) -> str:
    """Distances an axis, then hosts."""
    lines = [placement.summary(), ""]
    if placement.distances:
        lines.append(f"{'axis':8}{'GB hops before':>16}{'after':>12}{'change':>9}")
    rows: Sequence[tuple[str, tuple[float, float]]] = [*placement.distances.items()]
    for axis, (old, new) in [*rows, ("total", placement.totals)] if rows else []:
        change = f"{new / old - 1:+.1%}" if old else ""
        lines.append(f"{axis:8}{old / 1e9:16.4g}{new / 1e9:12.4g}{change:>9}")
    old_names = placement.previous or [node.name for node in placement.before.nodes]
    came = {name: index for index, name in enumerate(old_names)}
    width = max(4, *(len(node.name) for node in placement.after.nodes)) + 2
    lines += [*([""] if rows else []), f"{'node':>5}  {'host':{width}}{'ranks':13}{'was':>5}  path"]
    for index, (node, ranks) in enumerate(_with_ranks(placement.after)):
        held, was = f"{ranks.start}-{ranks.stop - 1}", came.get(node.name)
        before = "new" if was is None else "" if was == index else str(was)
        path = " / ".join(node.path)
        lines.append(f"{index:5}  {node.name:{width}}{held:13}{before:>5}  {path}".rstrip())
    return "\n".join(lines)


def _with_ranks(cluster: Cluster) -> list[tuple[Any, range]]:
    return [(node, cluster.ranks_of(i)) for i, node in enumerate(cluster.nodes)]
