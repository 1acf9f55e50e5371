"""Which host takes which ranks: the order of hosts in which heavy traffic stays near.

Ranks keep their arithmetic and hosts change places: upstream's groups are runs and strides of
ranks, torch sorts the ranks of every group, and a node's ranks must stay one run for rails to line
up. The cost of an order is bytes of a step (`traffic`) times network distance (`Cluster.distance`),
summed over pairs of nodes; `search` looks for the order of least cost.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.efa.cluster import search
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.cluster.traffic import Sizes, Traffic
from megatron.efa.errors import EfaError


@dataclass(frozen=True)
class Placement:
    """An order of hosts, and what it changes."""

    before: Cluster
    """Hosts as they came."""
    after: Cluster
    """Hosts in the order in which they should take ranks."""
    distances: dict[str, tuple[float, float]]
    """Axis -> bytes x hops per step, before and after; axes that stay in nodes are left out."""
    note: str = ""
    """Why hosts stay as they came, where there was nothing to choose by."""
    previous: tuple[str, ...] = ()
    """Host names in rank order of the start before, if it was to be followed."""

    @property
    def moved(self) -> int:
        """How many places got another host than before (than at the previous start, if given)."""
        old = self.previous or [node.name for node in self.before.nodes]
        return sum(a != b.name for a, b in zip(old, self.after.nodes, strict=True))

    @property
    def totals(self) -> tuple[float, float]:
        """Bytes x hops per step of all axes, before and after."""
        old, new = zip(*self.distances.values(), strict=True) if self.distances else ((0,), (0,))
        return sum(old), sum(new)

    def summary(self) -> str:
        """One line for people."""
        if self.note:
            return f"placement: {self.note}"
        old, new = self.totals
        axes = ", ".join(
            f"{axis} {after / before - 1:+.0%}" if before else f"{axis} {after / 1e9:.3g} GB hops"
            for axis, (before, after) in self.distances.items()
            if before or after
        )
        change = f"{new / old - 1:+.0%}" if old else "+0%"
        return (
            f"placement: {self.moved} of {len(self.after.nodes)} hosts moved, traffic x distance "
            f"{old / 1e9:.3g} -> {new / 1e9:.3g} GB hops a step ({change}: {axes})"
        )


def place(cluster: Cluster, sizes: Sizes, previous: Sequence[str] | None = None) -> Placement:
    """Choose the order of `cluster`'s hosts for a job of `sizes`.

    Without `previous` the cost is never above that of the hosts as they came, by name, or by tree.
    Hosts that came in another order give the same result, unless theirs was as good already. With
    `previous` (host names in rank order of an earlier start) every host still there keeps its
    ranks, and hosts new to it, else spares, take the ranks of those that are gone.
    Raises EfaError for sizes that do not fit, equal host names, or a `previous` of other length.
    """
    names = sorted(node.name for node in (*cluster.nodes, *cluster.spares))
    twice = [name for name, following in itertools.pairwise(names) if name == following]
    if twice:
        raise EfaError(
            f"the cluster has two hosts of the name {twice[0]} ({cluster.source or 'description'}):"
            " give each host a name of its own"
        )
    before = cluster if previous is None else _staffed(cluster, len(previous))
    if len({node.gpus for node in before.nodes}) > 1:
        note = "hosts stay as they came, since they hold different numbers of ranks"
        sizes.grids(before.world_size)
        return Placement(before, before, {}, note, tuple(previous or ()))
    by_axis = Traffic(sizes, before.world_size).between_nodes(before.nodes[0].gpus)
    weight = np.sum(list(by_axis.values()), axis=0)
    if previous is not None:
        nodes = _replaced(cluster, before, previous, weight)
    elif not any(node.path or node.domain for node in before.nodes):
        note = "hosts stay as they came, since nothing is known of the network between them"
        return Placement(before, before, {}, note)
    else:
        nodes = _searched(before, sizes, weight)
    after = _with(before, nodes)
    distances = {
        axis: (_cost(before.nodes, part), _cost(nodes, part))
        for axis, part in by_axis.items()
        if part.any()
    }
    return Placement(before, after, distances, previous=tuple(previous or ()))


def ordered_hosts(
    cluster: Cluster, sizes: Sizes, previous: Sequence[str] | None = None
) -> list[str]:
    """Host names in rank order, for a launcher: the first is node rank 0, and so on."""
    return [node.name for node in place(cluster, sizes, previous).after.nodes]


def _searched(cluster: Cluster, sizes: Sizes, weight: np.ndarray) -> Sequence[Node]:
    # By name first: the search then does not depend on the order in which hosts came.
    named = sorted(cluster.nodes, key=lambda node: node.name)
    paths = _paths(named)
    distance = search.distances(paths)
    count = np.arange(len(named))
    divisions = [
        division
        for division in _units(sizes, cluster.world_size, cluster.nodes[0].gpus)
        if 1 < division.shape[1] < len(named)
    ]
    by_path = sorted(count, key=lambda i: named[i].path)
    starts = [count, np.array(by_path), np.array(search.tree_order(paths, count.tolist()))]
    order = search.search(weight, distance, paths, starts, divisions)
    nodes = [named[i] for i in order]
    # Rounding aside, equal means that nothing is gained by moving.
    better = _cost(nodes, weight) < _cost(cluster.nodes, weight) * (1 - 1e-9)
    return nodes if better else cluster.nodes


def _units(sizes: Sizes, world_size: int, gpus: int) -> list[np.ndarray]:
    """Ways to divide the places: the nodes of an EP (or CP) group, pipelines of those, stages."""
    dense, expert = sizes.grids(world_size)
    pp, places = dense["pp"], world_size // gpus
    # Ranks from a stage to the next, and how often the whole pipeline repeats along the ranks.
    apart = world_size // pp
    if sizes.use_tp_pp_dp_mapping:
        apart = dense["tp"] * dense["cp"]
    if apart % gpus:
        apart = gpus
        pp = 1
    stride, divisions = apart // gpus, []
    sides = np.arange(places).reshape(-1, pp, stride)  # (pipelines' runs, stage, node in stage)
    for ranks in (expert["etp"] * expert["ep"], dense["tp"] * dense["cp"], gpus):
        nodes = max(ranks // gpus, 1)
        if places % nodes == 0:
            divisions.append(np.arange(places).reshape(-1, nodes))
        if stride % nodes == 0:
            lanes = sides.reshape(len(sides), pp, -1, nodes).transpose(0, 2, 1, 3)
            divisions.append(lanes.reshape(-1, pp * nodes))
    divisions.append(sides.reshape(-1, stride))
    return list({(d.shape, d.tobytes()): d for d in divisions}.values())


def _staffed(cluster: Cluster, places: int) -> Cluster:
    """`cluster` with as many spares taken in as it lacks hosts."""
    lacking = places - len(cluster.nodes)
    if not 0 <= lacking <= len(cluster.spares):
        raise EfaError(
            f"the previous order has {places} hosts, the cluster {len(cluster.nodes)} and "
            f"{len(cluster.spares)} spares: leave the previous order out to place the job anew"
        )
    return _with(cluster, (*cluster.nodes, *cluster.spares[:lacking]))


def _with(cluster: Cluster, nodes: Sequence[Node]) -> Cluster:
    """`cluster` on `nodes`; its other nodes are spares."""
    taken = {node.name for node in nodes}
    spares = [node for node in (*cluster.spares, *cluster.nodes) if node.name not in taken]
    return replace(cluster, nodes=tuple(nodes), spares=tuple(spares))


def _replaced(
    cluster: Cluster, before: Cluster, previous: Sequence[str], weight: np.ndarray
) -> list[Node]:
    """Hosts in their previous places, the best of the new ones in those of hosts that are gone."""
    here = {node.name: node for node in cluster.nodes}
    # A host of the previous order that is now called a spare was taken out on purpose.
    staying = [here.get(name) for name in previous]
    kept = {node.name for node in staying if node}
    if len(kept) < sum(node is not None for node in staying):
        raise EfaError("the previous order names a host twice: give the one that the job ran with")
    new = [node for node in cluster.nodes if node.name not in kept]
    vacant = [place for place, node in enumerate(staying) if node is None]
    # All new hosts take part; spares fill what is still vacant, whichever of them are nearest.
    pool = sorted(new, key=lambda n: n.name) + sorted(cluster.spares, key=lambda n: n.name)
    every = [node for node in staying if node] + pool
    distance = search.distances(_paths(every))
    index = {node.name: i for i, node in enumerate(every)}
    order = np.array([index[node.name] if node else -1 for node in staying])
    chosen = [index[node.name] for node in new]
    choices = [index[node.name] for node in pool if index[node.name] not in chosen]
    while vacant:
        filled = np.flatnonzero(order >= 0)
        among = chosen or choices
        far = weight[np.ix_(vacant, filled)] @ distance[np.ix_(order[filled], among)]
        which, whom = divmod(int(np.argmin(far)), len(among))
        order[vacant.pop(which)] = among.pop(whom)
    movable = np.array([node is None for node in staying])
    order = search.improve(weight, distance, order, len(order), movable)
    return [every[i] for i in order]


def _paths(nodes: Sequence[Node]) -> list[search.Path]:
    """Paths with the NVLink domain as the lowest layer, where any node has one."""
    if not any(node.domain for node in nodes):
        return [node.path for node in nodes]
    depth = max(len(node.path) for node in nodes)
    return [
        (*node.path, node.domain or i) if len(node.path) == depth else node.path
        for i, node in enumerate(nodes)
    ]


def _cost(nodes: Sequence[Node], weight: np.ndarray) -> float:
    return search.cost(weight, search.distances(_paths(nodes)), np.arange(len(nodes)))
