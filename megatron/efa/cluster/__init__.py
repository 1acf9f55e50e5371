"""The machines of a job as data: what they are, how near they are, which ranks they hold."""

from megatron.efa.cluster.model import Cluster, Link, Node

__all__ = ["Cluster", "Link", "Node"]
