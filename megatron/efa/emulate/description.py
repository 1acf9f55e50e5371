"""What an emulated cluster tells of itself: the description that its ranks read."""

from pathlib import Path

from megatron.efa.cluster import describe
from megatron.efa.cluster.model import Cluster, Link, Node
from megatron.efa.emulate.cluster import EmulatedCluster

NEAR = Link(200e6, 200e-6)
"""Of one rank to another of its node, while all of them send: gloo over loopback on two cores."""
LATENCY_S = 200e-6
"""Of a message between nodes: sockets and threads, for the links themselves have none."""


def write(cluster: EmulatedCluster, ranks_per_node: int) -> Path:
    """Write the description of a running `cluster` where its nodes see it; returns the path."""
    path = cluster.state / "cluster.yaml"
    describe.write(described(cluster, ranks_per_node), path)
    return path


def described(cluster: EmulatedCluster, ranks_per_node: int) -> Cluster:
    """Nodes on one switch; a rank's share of its node's link, where that is held to a rate."""
    far = None
    if cluster.rate is not None:
        far = Link(cluster.rate.bytes_per_second / ranks_per_node, LATENCY_S)
    nodes = (
        Node(node.hostname, ranks_per_node, ("switch",), "emulated", address=node.address)
        for node in cluster.nodes
    )
    return Cluster(tuple(nodes), source=f"emulated cluster {cluster.name}", near=NEAR, far=far)
