"""What a dispatcher costs, modelled: which one `auto` takes, and into how many chunks it cuts.

Times are those of the alpha-beta model (`Link`) of the cluster's links, per direction of one layer,
for uniform routing. R = N * P ranks, E experts, k a token, m bytes of tokens a rank.
"""

from dataclasses import dataclass
from math import comb

from megatron.efa.cluster.model import Link
from megatron.efa.comm.choose import MARGIN, SHARE, Costs

MOST_CHUNKS = 4
PEERS_AT_ONCE = 8
"""Messages of an all-to-all that share one latency: what is sent to more peers waits its turn."""


@dataclass(frozen=True)
class Layer:
    """An expert layer on an expert-parallel group."""

    nodes: int
    per_node: int
    experts: int
    topk: int
    size: float
    """Bytes of a rank's tokens."""
    most_nodes: int = 0
    """Nodes that the router lets a token go to; 0 for all."""


def expected_parts(parts: int, experts: int, topk: int) -> float:
    """Parts with an expert of a token, of `parts` that hold as many of the `experts` each.

    Expectation for k different experts chosen uniformly: each part is missed with probability
    C(E - E/parts, k) / C(E, k).
    """
    return parts * (1 - comb(experts - experts // parts, topk) / comb(experts, topk))


def rows_a_token(layer: Layer) -> tuple[float, float, float]:
    """(copies to other nodes, copies to nodes, copies to ranks) a token: once an expert in the
    first, once a node in the second (other nodes too), once a rank of all nodes in the third."""
    away = (layer.nodes - 1) / layer.nodes
    nodes = expected_parts(layer.nodes, layer.experts, layer.topk)
    ranks = expected_parts(layer.nodes * layer.per_node, layer.experts, layer.topk)
    if layer.most_nodes:
        nodes = min(nodes, layer.most_nodes)
    return layer.topk * away, nodes * away, ranks


def flat_seconds(layer: Layer, costs: Costs) -> float:
    """Upstream's all-to-all of tokens, and the one of probabilities."""
    copies, _, _ = rows_a_token(layer)
    ranks = layer.nodes * layer.per_node
    near_copies = layer.topk - copies
    latency = _latency(ranks - layer.per_node, layer.per_node - 1, costs)
    crossing = copies * layer.size / costs.far.peak
    in_node = near_copies * layer.size / costs.near.peak
    return 2 * (latency + costs.stage) + _beside(crossing, in_node, costs)


def hierarchical_seconds(layer: Layer, costs: Costs, chunks: int) -> float:
    """Both levels and the exchange of counts; what chunks leave uncovered is the first one's."""
    _, copies, ranks = rows_a_token(layer)
    crossing = copies * layer.size / costs.far.peak
    in_node = ranks * layer.size / costs.near.peak
    latency = _latency(layer.nodes - 1, layer.per_node - 1, costs)
    uncovered = min(crossing, in_node) / chunks if costs.gpu else 0
    stages = (2 * chunks + 2) * costs.stage
    return stages + (chunks + 1) * latency + _beside(crossing, in_node, costs) + uncovered


def chunks_of(nodes: int, size: float, costs: Costs) -> int:
    """As many chunks as still send messages to each node that reach `SHARE` of a rail's rate."""
    if nodes == 1:
        return 1
    link = Link(costs.far.peak, costs.far.latency + costs.stage)
    return max(1, min(MOST_CHUNKS, int(size / link.size_at(SHARE))))


def better(layer: Layer, costs: Costs) -> tuple[str, str]:
    """("alltoall" or "hierarchical", why)."""
    shape = f"{layer.nodes} nodes x {layer.per_node} ranks"
    if layer.nodes == 1:
        return "alltoall", f"the {layer.per_node} ranks of an expert group share a node"
    copies, once, _ = rows_a_token(layer)
    flat = flat_seconds(layer, costs)
    ours = hierarchical_seconds(layer, costs, chunks_of(layer.nodes, layer.size, costs))
    chosen = "hierarchical" if ours < MARGIN * flat else "alltoall"
    return chosen, (
        f"on {shape} a token crosses the network {once:.2f} times instead of {copies:.2f}, and a "
        f"dispatch of {layer.size / 2**20:.3g} MiB is modelled at {1e3 * ours:.3g} ms instead of "
        f"{1e3 * flat:.3g} ms"
    )


def _latency(far_peers: int, near_peers: int, costs: Costs) -> float:
    turns = (min(peers, max(1, peers / PEERS_AT_ONCE)) for peers in (far_peers, near_peers))
    return sum(n * link.latency for n, link in zip(turns, (costs.far, costs.near), strict=True))


def _beside(crossing: float, in_node: float, costs: Costs) -> float:
    """Of two transfers at once: on CPUs their sum, for copying takes the sockets' cores."""
    return max(crossing, in_node) if costs.gpu else crossing + in_node
