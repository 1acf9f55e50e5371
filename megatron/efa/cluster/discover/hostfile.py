"""A cluster from mpirun's hostfile: `name slots=8`, a host a line, in rank order."""

from pathlib import Path

from megatron.efa.cluster.discover.assemble import cluster_of
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError


def discover(path: Path, kind: str = "") -> Cluster:
    """Read it; a host without slots has as many GPUs as its `kind`. Raises EfaError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise EfaError(f"cannot read the hostfile {path}: {reason}") from error
    nodes, seen = [], set()
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words[0] in seen:
            raise EfaError(f"{path} line {number}: host {words[0]} stands twice: keep one")
        seen.add(words[0])
        nodes.append(Node(words[0], _slots(words[1:], path, number), kind=kind))
    if not nodes:
        raise EfaError(f"the hostfile {path} names no host: give one a line, in rank order")
    return cluster_of(nodes, str(path), ["a hostfile tells no network paths"])


def _slots(words: list[str], path: Path, number: int) -> int:
    for word in words:
        key, _, value = word.partition("=")
        if key in ("slots", "max_slots", "max-slots") and not (value.isdecimal() and int(value)):
            raise EfaError(f"{path} line {number}: {word} is no number of slots: write slots=8")
        if key == "slots":
            return int(value)
    return 0
