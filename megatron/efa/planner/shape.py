"""`Shape`: a model's dimensions; its parameters and its FLOPs as Megatron counts them.

Every count here is of the whole model; what one rank holds or does is in `memory` and `work`.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

import yaml

from megatron.efa.errors import EfaError


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder-only model; widths in elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv: int = 0
    """Key/value heads; unused with latent attention."""
    head_dim: int = 128
    ffn: int = 0
    """Width of a dense layer's MLP."""
    gated: bool = True
    """Three matrices an MLP (SwiGLU) instead of two."""
    dense: int = 0
    """Leading layers without experts."""
    q_lora: int = 0
    """Rank of the query's projection; -1: latent attention with a full query; 0: no latent
    attention."""
    kv_lora: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_dim: int = 0
    experts: int = 0
    topk: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    latent: int = 0
    """Width in which experts work, where it is not `hidden`."""
    groups: int = 0
    group_topk: int = 0
    mtp: int = 0
    window: int = 0
    windowed: int = 0
    """Layers whose attention sees `window` tokens only."""
    linear: int = 0
    """Layers that are Mamba-2 or gated linear attention instead of attention."""
    linear_heads: int = 0
    linear_dim: int = 0
    linear_state: int = 128
    linear_groups: int = 1
    moe_layers: int = -1
    """Hybrids whose blocks are either a mixer or an MLP: number of MLP blocks. -1: one in each
    layer."""
    compressed: float = 1.0
    """Share of the keys that compressed attention reads."""
    indexer: int = 0
    """Heads of the indexer of sparse attention."""
    unfused: bool = False
    """Experts have biases and clamps, which a fused SwiGLU does not cover."""
    streams: int = 1
    """Residual streams (hyper-connections)."""
    q_lora_gqa: int = 0
    """Rank of the query's projection under grouped-query attention."""
    qk_norm: bool = False
    tied: bool = False

    @property
    def moe(self) -> int:
        """Layers with experts, MTP's not counted."""
        if not self.experts:
            return 0
        return self.moe_layers if self.moe_layers >= 0 else self.layers - self.dense

    @property
    def dense_mlps(self) -> int:
        if self.moe_layers >= 0:
            return 0
        return self.layers - self.moe

    @property
    def attention_layers(self) -> int:
        mixers = self.layers - (self.moe_layers if self.moe_layers >= 0 else 0)
        return mixers - self.linear

    @property
    def hybrid(self) -> bool:
        """Whether blocks are of several kinds, or mixers not all attention."""
        return self.linear > 0 or self.moe_layers >= 0

    @property
    def mla(self) -> bool:
        return self.kv_lora > 0

    @property
    def query_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope + self.qk_rope if self.mla else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.v_dim if self.mla else self.head_dim

    @property
    def expert_width(self) -> int:
        """Width of a row that is dispatched."""
        return self.latent or self.hidden

    def attention_matrices(self) -> int:
        """Multiply-adds per token in one attention layer's projections."""
        h, n = self.hidden, self.heads
        if not self.mla:
            q, out = n * self.head_dim, n * self.head_dim
            if self.q_lora_gqa:
                r = self.q_lora_gqa
                return h * r + r * q + 2 * h * self.kv * self.head_dim + r * (q + h) * 1
            return h * (q + 2 * self.kv * self.head_dim + out)
        r = self.q_lora
        query = h * n * self.query_dim if r < 0 else r * (h + n * self.query_dim)
        latent = self.kv_lora * (h + n * (self.qk_nope + self.v_dim)) + h * self.qk_rope
        return query + latent + n * self.v_dim * h

    def attention_norms(self) -> int:
        """Norm weights inside one attention layer (the layer's own two are not counted)."""
        if not self.mla:
            return 2 * self.head_dim if self.qk_norm else 0
        return self.kv_lora + max(self.q_lora, 0)

    def linear_matrices(self) -> int:
        """Multiply-adds per token in one Mamba-2 or linear-attention layer's projections."""
        inner = self.linear_heads * self.linear_dim
        extra = 2 * self.linear_groups * self.linear_state + self.linear_heads
        return self.hidden * (2 * inner + extra) + inner * self.hidden

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return self.matrices * self.expert_width * self.expert_ffn

    def moe_shared_params(self) -> int:
        """Weights of one MoE layer that every token uses: shared expert, router, latent
        projections."""
        h = self.hidden
        return self.matrices * h * self.shared_ffn + h * self.experts + 2 * h * self.latent

    def mixer_norms(self) -> int:
        return 2 * self.hidden

    def mtp_params(self) -> tuple[int, int]:
        """(weights outside routed experts, weights of routed experts) of all MTP layers."""
        if not self.mtp:
            return 0, 0
        h = self.hidden
        layer = self.attention_matrices() + self.attention_norms() + 2 * h + 2 * h * h + 3 * h
        if self.experts:
            layer += self.moe_shared_params()
            return self.mtp * layer, self.mtp * self.experts * self.expert_params()
        return self.mtp * (layer + self.matrices * h * self.ffn), 0

    def params(self, mtp: bool = False) -> int:
        """Weights of the whole model; with `mtp` those of the MTP layers too."""
        h = self.hidden
        total = self.vocab * h * (1 if self.tied else 2) + h
        total += self.attention_layers * (self.attention_matrices() + self.attention_norms())
        total += self.linear * self.linear_matrices()
        total += self.layers * (h if self.moe_layers >= 0 else 2 * h)
        total += self.dense_mlps * self.matrices * h * self.ffn
        total += self.moe * (self.moe_shared_params() + self.experts * self.expert_params())
        return total + (sum(self.mtp_params()) if mtp else 0)

    def active_params(self) -> int:
        """Weights that one token uses."""
        return self.params() - self.moe * (self.experts - self.topk) * self.expert_params()

    def context(self, seq: int) -> float:
        """Mean keys that a token attends to, over the attention layers (causal)."""
        full = self.attention_layers - self.windowed
        wide = seq / 2 * self.compressed
        near = min(self.window, seq / 2)
        return (full * wide + self.windowed * near) / max(self.attention_layers, 1)

    def core_attention(self, seq: int) -> float:
        """Multiply-adds per token in one attention layer's scores and values (mean over layers)."""
        return self.context(seq) * self.heads * (self.query_dim + self.value_dim)

    def linear_scan(self) -> float:
        """Multiply-adds per token in one Mamba-2 layer's scan, as Megatron counts them (7/6 of
        d*n)."""
        return 7 / 3 * self.linear_heads * self.linear_dim * self.linear_state / 2

    def flops_per_token(self, seq: int) -> float:
        """Model FLOPs of forward and backward, the count of Megatron's
        num_floating_point_operations:
        two a multiply-add, three for forward and backward; router, norms and recomputation free."""
        h = self.hidden
        layer = self.attention_matrices() + self.core_attention(seq)
        mlp = self.matrices * (
            h * self.shared_ffn + self.expert_width * self.expert_ffn * self.topk
        )
        mlp += 2 * h * self.latent
        total = self.attention_layers * layer + self.moe * mlp
        total += self.linear * (self.linear_matrices() + self.linear_scan())
        total += self.dense_mlps * self.matrices * h * self.ffn
        total += self.mtp * (layer + (mlp if self.experts else self.matrices * h * self.ffn))
        total += self.mtp * (3 * h + 2 * h * h) + self.vocab * h * (1 + self.mtp)
        return 6 * total


def plain(name: str) -> str:
    """Letters and digits of a model's name, lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def catalogue() -> dict[str, Shape]:
    """Published models by the planner's name."""
    return {
        name: Shape(name=name, **{k: v for k, v in entry.items() if k != "aliases"})
        for name, entry in _entries().items()
    }


@cache
def _entries() -> dict[str, dict]:
    text = resources.files("megatron.efa.planner").joinpath("data/models.yaml").read_text()
    return yaml.safe_load(text)


def find(name: str) -> Shape:
    """The published model that `name` spells, whatever its case, punctuation or suffix.

    The longest alias that `name` begins with wins ("Kimi-K2 1.04T (384e)" is kimi-k2).
    Raises EfaError naming the nearest known names.
    """
    key = plain(name)
    known = {
        alias: model
        for model, entry in _entries().items()
        for alias in (plain(model), *entry["aliases"])
    }
    hits = [alias for alias in known if key.startswith(alias)]
    if not hits:
        raise EfaError(
            f"model {name!r}: not in the planner's catalogue (data/models.yaml), which has "
            f" {', '.join(sorted(catalogue()))}"
        )
    return catalogue()[known[max(hits, key=len)]]


def shortened(shape: Shape, layers: int, dense: int) -> Shape:
    """The same model with fewer layers, as proxies for benchmarks have."""
    return replace(shape, layers=layers, dense=dense, mtp=0)
