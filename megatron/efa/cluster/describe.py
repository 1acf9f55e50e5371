"""A cluster as a YAML file: written by discovery, edited by people, read by every rank.

    near: {bytes_per_second: 3.6e+11, seconds: 5.0e-06}   # one GPU to another of its node; optional
    far: {bytes_per_second: 4.3e+10, seconds: 2.0e-05}    # one GPU's share of the network; optional
    nodes:                                                # in rank order
      - {name: ip-10-0-0-7, kind: p5.48xlarge, path: [nn-a, nn-b, nn-c]}

`gpus` and the links come from the catalogue where a node's `kind` says them. docs/cluster.md.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from megatron.efa import aside
from megatron.efa.cluster.catalogue import Machine, machine
from megatron.efa.cluster.model import Cluster, Compute, Link, Node, Points
from megatron.efa.config.nearest import hint
from megatron.efa.errors import EfaError

_CLUSTER = {
    "source": str,
    "near": dict,
    "far": dict,
    "compute": dict,
    "nodes": list,
    "spares": list,
    "notes": list,
}
_NODE = {
    "name": str,
    "gpus": int,
    "path": list,
    "kind": str,
    "domain": str,
    "address": str,
    "instance": str,
}
_LINK = {"bytes_per_second": (int, float), "seconds": (int, float), "curves": dict}
_COMPUTE = {
    "kind": str,
    "memory_bytes": (int, float),
    "memory_bytes_per_second": (int, float),
    "gemm": dict,
    "block_seconds": (int, float),
    "moe_block_seconds": (int, float),
    "expert_seconds": (int, float),
    "step_seconds": (int, float),
    "dispatch_seconds": dict,
}


def read(path: str | Path) -> Cluster:
    """The cluster that file `path` describes. Raises EfaError, naming file and key."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EfaError(f"cannot read the description of the cluster {path}: {reason}") from error
    try:
        said = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "it is not YAML"
        raise EfaError(f"{path}{line}: {problem}: write it as docs/cluster.md shows") from error
    return parse(said, str(path))


def parse(said: Any, file: str) -> Cluster:
    """The cluster of a parsed description. Raises EfaError, naming `file` and key."""
    _check(said, _CLUSTER, file, "")
    nodes = [_node(entry, file, f"nodes[{i}]") for i, entry in enumerate(said.get("nodes") or [])]
    if not nodes:
        raise EfaError(f"{file}: nodes is empty: list the nodes of the job, in rank order")
    spares = [
        _node(entry, file, f"spares[{i}]") for i, entry in enumerate(said.get("spares") or [])
    ]
    _check_names([*nodes, *spares], file)
    links = {tier: _link(said[tier], file, tier) for tier in ("near", "far") if said.get(tier)}
    near, far = links_of(nodes)
    return Cluster(
        tuple(nodes),
        tuple(spares),
        said.get("source") or file,
        links.get("near", near),
        links.get("far", far),
        tuple(str(note) for note in said.get("notes") or ()),
        _compute(said["compute"], file) if said.get("compute") else None,
    )


def links_of(nodes: Iterable[Node]) -> tuple[Link | None, Link | None]:
    """(near, far) by the catalogue: those of the slowest kind; None if any kind says nothing."""
    kinds = {node.kind for node in nodes}
    if "" in kinds:
        return None, None
    machines = [machine(kind) for kind in sorted(kinds)]
    return _slowest([m.near for m in machines]), _slowest([m.far for m in machines])


def _slowest(links: list[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    return min(known, key=lambda link: link.peak) if len(known) == len(links) else None


def write(cluster: Cluster, path: Path) -> None:
    """Write the description of `cluster`: the same text for equal clusters. Raises EfaError."""
    try:
        with aside.beside(path) as made:
            (made / path.name).write_text(text_of(cluster))
            (made / path.name).replace(path)
    except OSError as error:
        raise EfaError(f"cannot write the cluster to {path}: {error.strerror}") from error


def text_of(cluster: Cluster) -> str:
    """The description of `cluster`, YAML, a line a node."""
    lines = []
    if cluster.source:
        lines.append(_line({"source": cluster.source}))
    for tier, link in (("near", cluster.near), ("far", cluster.far)):
        if link is not None:
            entry = {"bytes_per_second": link.peak, "seconds": link.latency}
            lines.append(_line({tier: entry | _lists("curves", link.curves)}))
    if cluster.compute is not None:
        lines.append(_line({"compute": _said(cluster.compute)}))
    for name, nodes in (("nodes", cluster.nodes), ("spares", cluster.spares)):
        if nodes:
            lines.append(f"{name}:")
            lines += [f"  - {_flow(_entry(node))}" for node in nodes]
    if cluster.notes:
        lines.append("notes:")
        lines += [f"  - {_flow(note)}" for note in cluster.notes]
    return "\n".join(lines) + "\n"


def _lists(key: str, curves: tuple[tuple[str, Points], ...]) -> dict[str, Any]:
    named = {name: [list(point) for point in points] for name, points in curves}
    return {key: named} if named else {}


def _said(compute: Compute) -> dict[str, Any]:
    return {
        "kind": compute.kind,
        "memory_bytes": compute.memory,
        "memory_bytes_per_second": compute.memory_rate,
        **_lists("gemm", compute.gemm),
        "block_seconds": compute.block,
        "moe_block_seconds": compute.moe_block,
        "expert_seconds": compute.expert,
        "step_seconds": compute.step,
        **({"dispatch_seconds": dict(compute.dispatch)} if compute.dispatch else {}),
    }


def _entry(node: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": node.name, "gpus": node.gpus}
    if node.path:
        entry["path"] = list(node.path)
    for key in ("kind", "domain", "address", "instance"):
        if getattr(node, key):
            entry[key] = getattr(node, key)
    return entry


def _line(entry: dict[str, Any]) -> str:
    return _flow(entry).removeprefix("{").removesuffix("}")


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def _node(entry: Any, file: str, at: str) -> Node:
    _check(entry, _NODE, file, at)
    known = machine(entry["kind"]) if entry.get("kind") else Machine("")
    gpus = entry.get("gpus", known.gpus)
    if not entry.get("name"):
        raise EfaError(f"{file}: {at} has no name: give the one that its launcher uses")
    if gpus is None:
        raise EfaError(f"{file}: {at} ({entry['name']}) says neither gpus nor a kind that has them")
    if gpus < 1:
        raise EfaError(f"{file}: {at}.gpus is {gpus}: a node that holds ranks has 1 or more")
    if known.gpus is not None and gpus > known.gpus:
        raise EfaError(
            f"{file}: {at}.gpus is {gpus}, but a {entry['kind']} has {known.gpus}: correct one"
        )
    path = tuple(entry.get("path") or ())
    if not all(isinstance(switch, str) for switch in path):
        raise EfaError(f"{file}: {at}.path is a list of names of switches, root first")
    rest = {key: entry.get(key) or "" for key in ("kind", "domain", "address", "instance")}
    return Node(entry["name"], gpus, path, **rest)


def _link(entry: Any, file: str, at: str) -> Link:
    _check(entry, _LINK, file, at)
    for key in ("bytes_per_second", "seconds"):
        if key not in entry:
            raise EfaError(f"{file}: {at} has no {key}: it takes bytes_per_second and seconds")
    if not (entry["bytes_per_second"] > 0 and entry["seconds"] >= 0):
        raise EfaError(f"{file}: {at} is no link: its bytes_per_second must be above 0")
    curves = _curves(entry.get("curves") or {}, file, f"{at}.curves")
    return Link(float(entry["bytes_per_second"]), float(entry["seconds"]), curves)


def _compute(entry: Any, file: str) -> Compute:
    _check(entry, _COMPUTE, file, "compute")
    extra = ("gemm", "dispatch_seconds")
    missing = [k for k in _COMPUTE if entry.get(k) is None and k != "dispatch_seconds"]
    if missing:
        raise EfaError(
            f"{file}: compute has no {', '.join(missing)}: `megatron-efa calibrate` writes all"
        )
    numbers = {key: float(entry[key]) for key in _COMPUTE if key not in ("kind", *extra)}
    dispatch = entry.get("dispatch_seconds") or {}
    for name, value in dispatch.items():
        if not isinstance(value, (int, float)) or not value > 0:
            raise EfaError(f"{file}: compute.dispatch_seconds.{name} must be a number above 0")
    wrong = [key for key, value in numbers.items() if not value > 0]
    if wrong:
        raise EfaError(f"{file}: compute.{wrong[0]} must be above 0")
    gemm = _curves(entry["gemm"], file, "compute.gemm")
    return Compute(
        entry["kind"],
        numbers["memory_bytes"],
        numbers["memory_bytes_per_second"],
        gemm,
        numbers["block_seconds"],
        numbers["moe_block_seconds"],
        numbers["expert_seconds"],
        numbers["step_seconds"],
        tuple((str(name), float(value)) for name, value in dispatch.items()),
    )


def _curves(said: Any, file: str, at: str) -> tuple[tuple[str, Points], ...]:
    """Named lists of points, each above the one before in its first number."""
    found = []
    for name, points in said.items():
        numbers = isinstance(points, list) and all(
            isinstance(p, list) and len(p) == 2 and all(isinstance(v, (int, float)) for v in p)
            for p in points
        )
        sizes = [p[0] for p in points] if numbers else []
        if not sizes or sizes != sorted(set(sizes)) or not all(v > 0 for p in points for v in p):
            raise EfaError(
                f"{file}: {at}.{name} must be a list of points [size, value], by size, above 0"
            )
        found.append((str(name), tuple((float(a), float(b)) for a, b in points)))
    return tuple(found)


def _check(entry: Any, keys: dict[str, Any], file: str, at: str) -> None:
    """Raise EfaError unless `entry` maps some of `keys` to values of their types."""
    where = f"{at}." if at else ""
    if not isinstance(entry, dict):
        raise EfaError(f"{file}: {at or 'the file'} must have keys ({', '.join(keys)})")
    for key, value in entry.items():
        if key not in keys:
            raise EfaError(f"{file}: there is no key {where}{key}{hint(str(key), keys)}")
        wrong = isinstance(value, bool) or not isinstance(value, keys[key])
        if value is not None and wrong:
            kinds = keys[key] if isinstance(keys[key], tuple) else (keys[key],)
            wanted = {str: "text", int: "a whole number", dict: "a mapping", list: "a list"}
            raise EfaError(
                f"{file}: {where}{key} must be {wanted.get(kinds[0], 'a number')}, not {value!r}"
            )


def _check_names(nodes: list[Node], file: str) -> None:
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise EfaError(f"{file}: two nodes are called {node.name}: give each its own name")
        seen.add(node.name)


class _Loader(yaml.SafeLoader):
    """Reads 3.6e11 as a number, which YAML 1.1 does not, and refuses a key given twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            problem = f"the key {twice} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
