"""The cluster that this process trains on: told by `use`, else what torchrun says of it."""

import os

from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError

_cluster: Cluster | None = None


def use(cluster: Cluster) -> None:
    """Make `cluster` the one that groups are split by. Its nodes must be in rank order."""
    global _cluster
    _cluster = cluster


def forget() -> None:
    """Forget what `use` told."""
    global _cluster
    _cluster = None


def current() -> Cluster:
    """Return the cluster told by `use`, else that of torchrun's variables."""
    return _cluster or of_torchrun(
        int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )


def of_torchrun(world_size: int, local_world_size: int) -> Cluster:
    """Equal nodes with nothing known but their size.

    Raises EfaError if the ranks do not fill whole nodes.
    """
    if world_size % local_world_size:
        raise EfaError(
            f"WORLD_SIZE={world_size} is not a whole number of nodes of "
            f"LOCAL_WORLD_SIZE={local_world_size} ranks: start as many ranks on every node, or "
            "describe the nodes in a file (--efa-cluster)"
        )
    nodes = (Node(f"node{i}", local_world_size) for i in range(world_size // local_world_size))
    return Cluster(tuple(nodes), source="torchrun")
