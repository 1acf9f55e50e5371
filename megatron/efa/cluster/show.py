"""A cluster for people: its tree of switches, nodes and ranks, as text, JSON and SVG."""

import json
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from megatron.efa.cluster.catalogue import kinds, machine
from megatron.efa.cluster.current import summary
from megatron.efa.cluster.model import Cluster, Link, Node

__all__ = ["as_json", "as_svg", "as_text", "summary"]


@dataclass
class Branch:
    """A switch: those below it, and the nodes on it (indices; spares after the nodes)."""

    name: str
    below: dict[str, "Branch"] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)


def tree_of(cluster: Cluster) -> Branch:
    """The root, which has no name; nodes without a path hang on it."""
    root = Branch("")
    for index, node in enumerate((*cluster.nodes, *cluster.spares)):
        branch = root
        for switch in node.path:
            branch = branch.below.setdefault(switch, Branch(switch))
        branch.nodes.append(index)
    return root


def as_text(cluster: Cluster) -> str:
    """A summary, the links, and the tree."""
    lines = [summary(cluster)]
    for tier, link in (("inside a node", cluster.near), ("between nodes", cluster.far)):
        lines.append(f"a GPU's link {tier}: {_link(link)}")
    root = tree_of(cluster)
    if not root.below:
        lines.append("(no network paths known: nodes in rank order)")
    return "\n".join([*lines, "", *_lines(cluster, root, "")])


def _lines(cluster: Cluster, branch: Branch, indent: str) -> list[str]:
    lines: list[str] = []
    entries: list[Branch | int] = [*branch.below.values(), *branch.nodes]
    for number, entry in enumerate(entries):
        last = number == len(entries) - 1
        bar, rest = ("└─ ", "   ") if last else ("├─ ", "│  ")
        if isinstance(entry, int):
            lines.append(indent + bar + _node(cluster, entry))
        else:
            lines.append(indent + bar + entry.name)
            lines += _lines(cluster, entry, indent + rest)
    return lines


def _node(cluster: Cluster, index: int) -> str:
    """`node 3  ip-10-0-0-7  ranks 24-31  p5.48xlarge, 8 GPUs, 32 rails`."""
    node, held = _held(cluster, index)
    where = f"node {index}" if held else "spare"
    ranks = f"  ranks {held.start}-{held.stop - 1}" if held else ""
    domain = f"  NVLink domain {node.domain}" if node.domain else ""
    return f"{where}  {node.name}{ranks}  {_kind(node)}{domain}"


def _kind(node: Node) -> str:
    known = machine(node.kind) if node.kind in kinds() else None
    words = [node.kind, f"{node.gpus} GPUs" if node.gpus != 1 else "1 GPU"]
    if known and known.interfaces:
        words.append(f"{known.interfaces} {known.fabric or 'network'} interfaces")
    return ", ".join(word for word in words if word)


def _held(cluster: Cluster, index: int) -> tuple[Node, range | None]:
    if index < len(cluster.nodes):
        return cluster.nodes[index], cluster.ranks_of(index)
    return cluster.spares[index - len(cluster.nodes)], None


def _link(link: Link | None) -> str:
    if link is None:
        return "not known"
    return f"{link.peak / 1e9:.4g} GB/s, {link.latency * 1e6:.3g} us"


def as_json(cluster: Cluster) -> str:
    """Everything that is known, with the ranks of each node."""
    nodes: list[dict[str, Any]] = []
    for index in range(len(cluster.nodes)):
        node, held = _held(cluster, index)
        nodes.append(asdict(node) | {"ranks": [held.start, held.stop - 1]})
    made = {
        "source": cluster.source,
        "near": _known(cluster.near),
        "far": _known(cluster.far),
        "nodes": nodes,
        "spares": [asdict(node) for node in cluster.spares],
        "notes": list(cluster.notes),
    }
    if cluster.compute is not None:
        made["compute"] = asdict(cluster.compute)
    return json.dumps(made, indent=1)


def _known(link: Link | None) -> dict[str, Any] | None:
    return link and {key: value for key, value in asdict(link).items() if value != ()}


ROW, STEP, WIDTH = 22, 170, 330
"""Pixels: a line, a layer of switches, a node's label."""


def as_svg(cluster: Cluster) -> str:
    """The tree from left to right, a row a node."""
    drawn: list[str] = []
    rows = 0

    def draw(branch: Branch, depth: int) -> float:
        """Draws what is below `branch`; returns the height of its middle."""
        nonlocal rows
        heights = [(draw(below, depth + 1), below.name) for below in branch.below.values()]
        for index in branch.nodes:
            y = (rows + 1) * ROW
            rows += 1
            heights.append((y, ""))
            drawn.append(_label(x(depth + 1), y, _node(cluster, index), "node"))
        middle = sum(y for y, _ in heights) / len(heights)
        for y, name in heights:
            bend = x(depth) + STEP - 28
            start = x(depth) + 8 if branch.name else x(depth)
            drawn.append(f'<path d="M{start} {middle:g} H{bend} V{y:g} H{x(depth + 1) - 6}"/>')
            if name:
                drawn.append(_label(x(depth + 1), y, name, "switch"))
        return middle

    def x(depth: int) -> float:
        return 12 + STEP * depth

    draw(tree_of(cluster), 0)
    depth = max(len(node.path) for node in (*cluster.nodes, *cluster.spares)) + 1
    width, height = x(depth) + WIDTH, (rows + 1) * ROW
    style = (
        "text{font:12px sans-serif;dominant-baseline:middle}"
        ".switch{fill:#08519c}path{fill:none;stroke:#999}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}">',
            f"<title>{escape(summary(cluster))}</title><style>{style}</style>",
            *drawn,
            "</svg>\n",
        ]
    )


def _label(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'
