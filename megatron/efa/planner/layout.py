"""`Job`: how a model is laid out over GPUs, and what is known of the software that runs it."""

from dataclasses import dataclass, field

from megatron.efa.errors import EfaError

DISPATCHERS = ("alltoall", "hierarchical", "library", "proxy")
"""alltoall: one copy per chosen expert. hierarchical: one per chosen node, then inside the node.
library: the same bytes in fused kernels (DeepEP, HybridEP). proxy: those through a host thread
(UCCL-EP, DeepEP over NVSHMEM's libfabric transport), which pays per token as well."""


@dataclass(frozen=True)
class Job:
    """A layout and the settings that bear on time or memory."""

    gpus: int
    seq: int
    gbs: int
    mbs: int = 1
    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    precision: str = "bf16"
    """bf16, fp8, fp4 or fp32: of the GEMMs."""
    recompute: frozenset[str] = field(default_factory=frozenset)
    """Megatron's recompute modules, or {"full"}."""
    dispatcher: str = "alltoall"
    ep_overlap: bool = False
    fsdp: bool = False
    imbalance: float = 1.0
    """Rows of the busiest expert rank over the mean."""
    natural: bool = False
    """Real routing instead of forced balance."""
    drop: bool = False
    """Tokens over an expert's capacity are dropped."""
    release: str = "plain"
    """Key of the release factors in data/constants.yaml."""
    implementation: str = "transformer_engine"
    """Of the layers: Megatron's --transformer-impl."""
    moment_bytes: int = 4
    grad_bytes: int = 4

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return max(self.gpus // (self.etp * self.ep * self.pp), 1)

    @property
    def microbatches(self) -> int:
        return max(round(self.gbs / (self.dp * self.mbs)), 1)

    @property
    def tokens(self) -> float:
        """Of a microbatch on one rank: a tensor and context rank has its share of each sequence."""
        return self.mbs * self.seq / (self.tp * self.cp)

    def check(self) -> None:
        """Raises EfaError if the sizes do not divide."""
        if self.gpus % (self.tp * self.pp * self.cp):
            raise EfaError(
                f"layout: {self.gpus} GPUs are not a multiple of tp x pp x cp = "
                f"{self.tp} x {self.pp} x {self.cp}"
            )
        if self.gpus % (self.etp * self.ep * self.pp):
            raise EfaError(
                f"layout: {self.gpus} GPUs are not a multiple of etp x ep x pp = "
                f"{self.etp} x {self.ep} x {self.pp}"
            )
        if self.gbs < self.dp * self.mbs:
            raise EfaError(
                f"layout: a global batch of {self.gbs} is smaller than dp x mbs = "
                f"{self.dp} x {self.mbs}"
            )
