"""What all sources share: nodes made whole by the catalogue, and notes of what is missing."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron.efa.cluster.catalogue import Machine, kinds, machine
from megatron.efa.cluster.describe import links_of
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError


def cluster_of(
    nodes: Sequence[Node], source: str, notes: Iterable[str] = (), spares: Sequence[Node] = ()
) -> Cluster:
    """A cluster of `nodes`, with the catalogue's links and a note for each thing not known.

    A node of 0 gpus gets its kind's. Raises EfaError if nobody says how many it has.
    """
    notes = list(notes)
    whole = [_with_gpus(node, source) for node in nodes]
    unknown = sorted({node.kind for node in whole if node.kind and node.kind not in kinds()})
    if unknown:
        notes.append(f"the catalogue has no {', '.join(unknown)}: rates of their links not known")
    lost = [node.name for node in whole if not node.path]
    depths = {len(node.path) for node in whole if node.path}
    if lost and depths:
        notes.append(f"no network path of {some(lost)}: taken to be far from all others")
    if len(depths) > 1:
        notes.append(f"network paths of {' and '.join(map(str, sorted(depths)))} layers are mixed")
    mixed = sorted({node.kind for node in whole if node.kind})
    if len(mixed) > 1:
        notes.append(f"kinds are mixed ({', '.join(mixed)}): links are those of the slowest")
    near, far = (None, None) if unknown else links_of(whole)
    return Cluster(tuple(whole), tuple(spares), source, near, far, tuple(notes))


def known(kind: str) -> Machine:
    """The catalogue's machine, or one of which nothing is known."""
    return machine(kind) if kind in kinds() else Machine(kind)


def some(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 5 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _with_gpus(node: Node, source: str) -> Node:
    if node.gpus:
        return node
    gpus = known(node.kind).gpus
    if not gpus:
        raise EfaError(
            f"{source} does not say how many GPUs {node.name} has, nor a kind that the catalogue "
            "knows: give --kind, or write the description by hand"
        )
    return replace(node, gpus=gpus)
