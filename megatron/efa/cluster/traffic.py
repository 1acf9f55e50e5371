"""How many bytes each pair of ranks, and so of nodes, exchanges in a training step.

A simple model, made to compare orders of hosts, not to time a step. Each group's bytes are spread
evenly over its pairs: exact for all-to-alls of uniform routing; for all-reduces and the like it is
what a ring costs on average if nothing is known of its order. Pipelines are chains. b is bytes per
element (2), t = seq-length x micro-batch-size / CP tokens, m microbatches, l layers of a stage.
Bytes from a rank to one peer of its group of n, a step:

    tp    m l (8, with experts 4) t h b / n      all-gathers and reduce-scatters of sequence
          parallelism, 4 forward and 4 backward a layer (Korthikanti et al., arXiv 2205.05198)
    cp    m l 3 (2 t kv b) / TP                  keys and values go round forward and backward, and
          their gradients backward (Liu et al., arXiv 2310.01889)
    ep    m l 4 (t / TP) k h b / n               dispatch and combine, forward and backward, one
          copy of a token for each of k experts (Lepikhin et al., arXiv 2006.16668)
    pp    m 2 v (t / TP) h b to the next stage   activations forward, gradients back, for v virtual
          stages (Narayanan et al., arXiv 2104.04473); with v > 1 the last stage meets the first
    dp    (4 + b) P / n,  edp  (4 + b) E / n     reduce-scatter of fp32 gradients and all-gather of
          parameters (Rajbhandari et al., arXiv 1910.02054); P dense, E expert parameters of a rank

Left out: embeddings (and what ties them), router, norms, metadata, two-level forms of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from megatron.efa.errors import EfaError

AXES = ("tp", "cp", "ep", "pp", "dp", "edp")
_BYTES = 2  # bf16
_GRADIENT = 4  # gradients are reduced in fp32 unless a flag says otherwise


@dataclass(frozen=True)
class Sizes:
    """Megatron's arguments that say who talks to whom, and how much. Names are Megatron's."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    use_tp_pp_dp_mapping: bool = False
    num_layers: int = 32
    hidden_size: int = 4096
    ffn_hidden_size: int | None = None
    num_attention_heads: int = 32
    num_query_groups: int | None = None
    kv_channels: int | None = None
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    seq_length: int = 4096
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Sizes":
        """Take what `given` (Megatron's argument names) has; the rest, and None, is the default.

        Raises EfaError for a value that is not a positive whole number.
        """
        known = {}
        for item in fields(cls):
            value = given.get(item.name)
            if value is None:
                continue
            flag = item.name == "use_tp_pp_dp_mapping"
            if not flag and (type(value) is not int or value < 1):
                raise EfaError(f"{item.name} is {value!r}, but must be a positive whole number")
            known[item.name] = value
        return cls(**known)

    @property
    def etp(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def grids(self, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the dense and the expert grid of ranks: axis -> size, fastest first.

        That is `tp-cp-ep-dp-pp` of upstream's RankGenerator (core/parallel_state.py), or
        `tp-cp-ep-pp-dp`. Raises EfaError if the sizes do not divide `world_size`.
        """
        tp, cp, pp = (
            self.tensor_model_parallel_size,
            self.context_parallel_size,
            self.pipeline_model_parallel_size,
        )
        ep = self.expert_model_parallel_size
        for what, part in (
            ("tensor x context x pipeline", tp * cp * pp),
            ("expert-tensor x expert x pipeline", self.etp * ep * pp),
        ):
            if world_size % part:
                raise EfaError(
                    f"{what} parallel sizes make {part}, which does not divide {world_size} ranks: "
                    "change the sizes or the number of nodes"
                )
        dense = {"tp": tp, "cp": cp, "dp": world_size // (tp * cp * pp), "pp": pp}
        expert = {"etp": self.etp, "ep": ep, "edp": world_size // (self.etp * ep * pp), "pp": pp}
        if self.use_tp_pp_dp_mapping:
            if pp > 1 and self.num_experts and expert["edp"] != dense["dp"]:
                raise EfaError(
                    "--use-tp-pp-dp-mapping needs equal dense and expert data parallel sizes, "
                    f"which are {dense['dp']} and {expert['edp']}: leave the flag out"
                )
            dense["dp"], expert["edp"] = dense.pop("dp"), expert.pop("edp")
        return dense, expert


@dataclass(frozen=True)
class Traffic:
    """Bytes per step between the ranks of a job of `world_size`."""

    sizes: Sizes
    world_size: int

    @cached_property
    def per_pair(self) -> dict[str, float]:
        """Axis -> bytes per step from a rank to one peer (`pp`: to the next stage)."""
        s, (dense, expert) = self.sizes, self.sizes.grids(self.world_size)
        tp, cp, dp, pp = (dense[axis] for axis in ("tp", "cp", "dp", "pp"))
        h, ffn = s.hidden_size, s.ffn_hidden_size or 4 * s.hidden_size
        per_head = s.kv_channels or max(h // s.num_attention_heads, 1)
        kv = per_head * (s.num_query_groups or s.num_attention_heads)
        tokens = s.seq_length * s.micro_batch_size / cp
        batches = max((s.global_batch_size or dp * s.micro_batch_size) / dp / s.micro_batch_size, 1)
        layers = s.num_layers / pp
        wide = h * _BYTES * tokens
        attention = 2 * h * per_head * s.num_attention_heads + 2 * h * kv
        dense_parameters = layers * (attention + (0 if s.num_experts else 3 * h * ffn)) / tp
        found = dict.fromkeys(AXES, 0.0)
        found["tp"] = batches * layers * (4 if s.num_experts else 8) * wide / tp
        found["cp"] = batches * layers * 3 * 2 * tokens * kv * _BYTES / tp
        virtual = s.num_virtual_stages_per_pipeline_rank or 1
        found["pp"] = batches * virtual * wide / tp
        found["dp"] = (_GRADIENT + _BYTES) * dense_parameters / (dp * cp)
        if s.num_experts:
            ep, edp = expert["ep"], expert["edp"]
            found["ep"] = batches * layers * 4 * wide / tp * s.moe_router_topk / (ep * s.etp)
            expert_parameters = layers * 3 * h * (s.moe_ffn_hidden_size or ffn) * s.num_experts
            found["edp"] = (_GRADIENT + _BYTES) * expert_parameters / (ep * s.etp) / edp
        return found

    def between_nodes(self, gpus: int) -> dict[str, np.ndarray]:
        """Axis -> (nodes, nodes) float64, symmetric: bytes per step both ways between two places.

        A place is a node of `gpus` consecutive ranks. `world_size` must be a multiple of it.
        """
        dense, expert = self.sizes.grids(self.world_size)
        nodes = self.world_size // gpus
        pairs = self.per_pair
        return {
            "tp": 2 * pairs["tp"] * _cliques(dense, ("tp",), nodes),
            "cp": 2 * pairs["cp"] * _cliques(dense, ("cp",), nodes),
            "ep": 2 * pairs["ep"] * _cliques(expert, ("etp", "ep"), nodes),
            "pp": 2 * pairs["pp"] * self._chain(dense, nodes),
            "dp": 2 * pairs["dp"] * _cliques(dense, ("cp", "dp"), nodes),
            "edp": 2 * pairs["edp"] * _cliques(expert, ("edp",), nodes),
        }

    def _chain(self, grid: dict[str, int], nodes: int) -> np.ndarray:
        count = np.zeros((nodes, nodes))
        stages, stride = grid["pp"], _stride(grid, "pp")
        ranks = np.arange(self.world_size)
        following = ranks + stride
        last = ranks // stride % stages == stages - 1
        following[last] -= stages * stride
        if (self.sizes.num_virtual_stages_per_pipeline_rank or 1) == 1:
            ranks, following = ranks[~last], following[~last]
        gpus = self.world_size // nodes
        np.add.at(count, (ranks // gpus, following // gpus), 1)
        np.fill_diagonal(count, 0)
        return count + count.T


def _stride(grid: dict[str, int], axis: str) -> int:
    stride = 1
    for name, size in grid.items():
        if name == axis:
            return stride
        stride *= size
    raise KeyError(axis)


def _cliques(grid: dict[str, int], axes: tuple[str, ...], nodes: int) -> np.ndarray:
    """(nodes, nodes): pairs of ranks, one on each node, of one group along `axes` of `grid`."""
    world = int(np.prod(list(grid.values())))
    ranks = np.arange(world)
    group, groups = np.zeros(world, dtype=np.int64), 1
    for axis, size in grid.items():
        if axis not in axes:
            group += ranks // _stride(grid, axis) % size * groups
            groups *= size
    members = np.zeros((groups, nodes))
    np.add.at(members, (group, ranks // (world // nodes)), 1)
    members = members[(members > 0).sum(1) > 1]  # a group within a node costs nothing
    pairs = members.T @ members
    np.fill_diagonal(pairs, 0)
    return pairs
