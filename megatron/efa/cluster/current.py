"""The cluster that this process trains on: told by `use`, by a description, or by torchrun.

A description (`--efa-cluster FILE`, or MEGATRON_EFA_CLUSTER=FILE in the environment) counts before
what torchrun's variables say: they know how many ranks a node has, and nothing of the network.
"""

import os
import socket
from argparse import Namespace

from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError

VARIABLE = "MEGATRON_EFA_CLUSTER"

_cluster: Cluster | None = None
_described: tuple[str, Cluster] | None = None


def use(cluster: Cluster) -> None:
    """Make `cluster` the one that groups are split by. Its nodes must be in rank order."""
    global _cluster
    _cluster = cluster


def forget() -> None:
    """Forget what `use` told."""
    global _cluster
    _cluster = None


def current() -> Cluster:
    """Return the cluster told by `use`, else the one described, else that of torchrun's variables.

    Raises EfaError for a description that is wrong in itself.
    """
    if _cluster is not None:
        return _cluster
    if path := os.environ.get(VARIABLE):
        return _read(path)
    return of_torchrun(
        int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )


def configure(args: Namespace) -> None:
    """Take the description that Megatron's `args` name, and say on rank 0 what is known.

    Where hosts keep the launcher's order (no `--efa-placement`), raises EfaError if this rank is
    not where the description has it.
    """
    if path := getattr(args, "efa_cluster", None):
        os.environ[VARIABLE] = os.path.abspath(path)
    cluster = current()
    if os.environ.get(VARIABLE) and getattr(args, "efa_placement", "off") == "off":
        check(cluster, int(os.environ.get("RANK", "0")), args.world_size)
    if args.rank == 0 and (os.environ.get(VARIABLE) or cluster.notes):
        print(f"> cluster: {summary(cluster)}", flush=True)


def check(cluster: Cluster, rank: int, world_size: int) -> None:
    """Raise EfaError unless `cluster` holds `world_size` ranks and `rank` on this very host."""
    source = cluster.source or "the description"
    if cluster.world_size != world_size:
        raise EfaError(
            f"{source} describes {len(cluster.nodes)} nodes with {cluster.world_size} ranks and "
            f"this job has {world_size}: keep the nodes of the job, or correct their gpus"
        )
    index = cluster.node_of(rank)
    node, names = cluster.nodes[index], names_of_host()
    if node.name.split(".")[0] not in {name.split(".")[0] for name in names}:
        places = [i for i, other in enumerate(cluster.nodes) if other.name in names]
        where = f"it has {names[0]} as node {places[0]}" if places else f"it has no {names[0]}"
        raise EfaError(
            f"rank {rank} runs on {names[0]}, but {source} has node {index}, {node.name}, there "
            f"({where}): describe the nodes in rank order, or give --efa-placement on"
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", node.gpus))
    if node.gpus != local:
        raise EfaError(
            f"{source} gives {node.name} {node.gpus} ranks and torchrun started {local} there: "
            "start as many as it says, or correct its gpus"
        )


def names_of_host() -> list[str]:
    """What this host may be called in a description, the surest first.

    MEGATRON_EFA_HOST is for where the kernel does not know it (a pod: give it `spec.nodeName`).
    """
    said = (os.environ.get(name) for name in ("MEGATRON_EFA_HOST", "SLURMD_NODENAME"))
    return [*(name for name in said if name), socket.gethostname()]


def summary(cluster: Cluster) -> str:
    """One line: what is known of `cluster`, and what is not."""
    kinds = sorted({node.kind for node in cluster.nodes if node.kind})
    layers = {len(node.path) for node in cluster.nodes}
    depth = (
        f"{_many(max(layers), 'switch', 'es')} deep" if max(layers) else "network paths not known"
    )
    rate = "" if cluster.far is None else f", {cluster.far.peak / 1e9:.3g} GB/s a GPU between nodes"
    missing = f"; {'; '.join(cluster.notes)}" if cluster.notes else ""
    return (
        f"{_many(len(cluster.nodes), 'node')}, {_many(cluster.world_size, 'GPU')}"
        f"{f' ({", ".join(kinds)})' if kinds else ''}, {depth}{rate}, from "
        f"{cluster.source or 'a description'}{missing}"
    )


def _many(count: int, thing: str, plural: str = "s") -> str:
    return f"{count} {thing}{plural if count != 1 else ''}"


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


def _read(path: str) -> Cluster:
    """The description at `path`, read once."""
    global _described
    if _described is None or _described[0] != path:
        from megatron.efa.cluster import describe

        _described = (path, describe.read(path))
    return _described[1]
