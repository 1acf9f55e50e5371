"""`Cluster`: nodes in rank order, each with its GPUs and its path through the network.

Everything else reads it: placement orders its nodes, groups split by them, `auto` and the planner
ask its links how long a message takes. It holds no instance name but as a key of the catalogue.
"""

import bisect
import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Compute:
    """What `megatron-efa calibrate` measured of one GPU (or of one rank on CPUs, all at work)."""

    kind: str
    """The GPU's name, or cpu."""
    memory: float
    """Bytes that a rank may use."""
    memory_rate: float
    """Bytes per second of a copy, reads and writes together."""
    gemm: tuple[tuple[str, Points], ...]
    """By precision: points (FLOPs of one GEMM, FLOP/s), by size."""
    block: float
    """Seconds that the host needs to launch attention's forward and backward of one layer."""
    moe_block: float
    """The same of a mixture of experts, the experts aside."""
    expert: float
    """The same of each expert that a rank holds: one after the other without grouped GEMMs."""
    step: float
    """Seconds of a step beside its layers: optimizer, gradient norm, data."""
    dispatch: tuple[tuple[str, float], ...] = ()
    """By dispatcher: seconds that a mixture of experts takes longer when its ranks exchange almost
    nothing, forward and backward."""


@dataclass(frozen=True)
class Link:
    """One GPU's share of a tier: a message of n bytes takes `latency + n / peak` seconds.

    That is the alpha-beta model; a message of `latency * peak` bytes reaches half the peak rate.
    """

    peak: float
    """Bytes per second, one way."""
    latency: float
    """Seconds."""
    curves: tuple[tuple[str, Points], ...] = ()
    """What `megatron-efa calibrate` measured: by collective, points (bytes that one GPU sends to
    others of the tier in a call, seconds of the call), by size. Empty: nothing was measured."""

    def seconds(self, size: float, messages: int = 1) -> float:
        """Time for `size` bytes in `messages` messages, one after the other."""
        return messages * self.latency + size / self.peak

    def size_at(self, share: float) -> float:
        """Bytes of the message that reaches `share` (between 0 and 1) of the peak rate."""
        return self.latency * self.peak * share / (1 - share)


@dataclass(frozen=True)
class Node:
    """One host."""

    name: str
    """Host name, as the launcher and `socket.gethostname()` spell it."""
    gpus: int
    """Ranks that it holds."""
    path: tuple[str, ...] = ()
    """Switches from the root of the network to this node; empty if not known."""
    kind: str = ""
    """Key in the catalogue; empty if not known."""
    domain: str = ""
    """NVLink domain, where it spans hosts; empty where a host is its own domain."""
    address: str = ""
    """What other nodes dial, where the name does not resolve."""
    instance: str = ""
    """The cloud's id of it."""


@dataclass(frozen=True)
class Cluster:
    """Nodes in rank order: the first holds ranks 0 to gpus - 1, and so on."""

    nodes: tuple[Node, ...]
    spares: tuple[Node, ...] = ()
    """Nodes at hand that hold no ranks."""
    source: str = ""
    """Where the description comes from, for people."""
    near: Link | None = None
    """Between two GPUs of one NVLink domain (or host, where there is none)."""
    far: Link | None = None
    """Between two hosts, one GPU's share of its host's network."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What discovery could not find out, a sentence each."""
    compute: Compute | None = None
    """Of each GPU, where it was measured."""

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((node.gpus for node in self.nodes), initial=0))

    @property
    def world_size(self) -> int:
        return self._starts[-1]

    def node_of(self, rank: int) -> int:
        """Index in `nodes` of the node that holds `rank`. Raises IndexError if none does."""
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} of {self.world_size}")
        return bisect.bisect_right(self._starts, rank) - 1

    def ranks_of(self, node: int) -> range:
        """Ranks of the node with index `node`."""
        return range(self._starts[node], self._starts[node + 1])

    def domain_of(self, rank: int) -> str | int:
        """Names the NVLink domain of `rank`: equal for two ranks that share one."""
        node = self.node_of(rank)
        return self.nodes[node].domain or node

    def distance(self, a: int, b: int) -> int:
        """Network hops between nodes with indices `a` and `b` up to their lowest common switch.

        0 for a node and itself, 1 under one bottom switch, one more for each layer above. EC2's
        convention plus one for leaving the node, so that it differs from staying in it. Nodes
        whose paths are not known, or share no switch, are farther than any two that share one.
        """
        if a == b:
            return 0
        first, second = self.nodes[a].path, self.nodes[b].path
        shared = sum(
            1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(first, second, strict=False))
        )
        depth = max(len(node.path) for node in self.nodes)
        return 1 + depth - shared

    def ordered(self, order: list[int]) -> "Cluster":
        """The same cluster with its nodes in another order. Raises ValueError if not one."""
        if sorted(order) != list(range(len(self.nodes))):
            raise ValueError(f"not an order of {len(self.nodes)} nodes: {order}")
        return replace(self, nodes=tuple(self.nodes[i] for i in order))
