"""A config's scaled-down twin: the same code path in sizes that four CPU ranks train in seconds.

Sizes shrink by rule. What chooses code stays: kind of attention and its norms, router (score, bias,
groups, balancing), dispatcher, shared expert, MTP, pipeline with virtual stages, sequence and
expert parallelism, overlaps, recomputation, bf16. Left out is what only GPUs have: Transformer
Engine's grouped GEMMs and with them `moe_act`'s recomputation, and FP8.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from megatron.efa.config.compose import EXAMPLES, compose
from megatron.efa.planner import from_config, pipeline

RANKS = 4
SEQ = 32
STEPS = 3
MICROBATCHES = 4

_SIZES = {
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "num_experts": 8,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "max_position_embeddings": SEQ,
    "seq_length": SEQ,
    "vocab_size": 128,
    "train_iters": STEPS,
    "eval_iters": 0,
}
"""Instead of the config's, where it has the key."""

_ADDED = {"data": {"num_workers": 0}, "train": {"distributed_timeout_minutes": 2}}
_GPU_ONLY = ("moe_grouped_gemm", "fp8", "fp8_recipe", "fp8_param_gather")


def twin(config: Path) -> dict[str, dict[str, Any]]:
    """Keys of the twin by group, as a config file has them. Raises EfaError for a wrong config."""
    settings = compose(str(config))
    values = {setting.key: setting.value for setting in settings}
    groups = {setting.key: setting.group for setting in settings}
    small = {key: _SIZES.get(key, value) for key, value in values.items()}
    small = {key: value for key, value in small.items() if key not in _GPU_ONLY}
    small |= _experts(values) | _parallel(values) | _recompute(values)
    small |= _layers(values, small)
    out: dict[str, dict[str, Any]] = {}
    for key, value in small.items():
        if groups.get(key) != "cluster":
            out.setdefault(groups.get(key, "parallel"), {})[key] = value
    for group, keys in _ADDED.items():
        out.setdefault(group, {}).update(keys)
    bf16 = {"bf16": True} if values.get("bf16") else {}
    out["cluster"] = yaml.safe_load((EXAMPLES / "cluster/cpu.yaml").read_text()) | bf16
    return out


def text(config: Path) -> str:
    """The twin as a config file."""
    head = f"# Scaled-down twin of {config.name}: {RANKS} CPU ranks, {STEPS} steps.\n"
    return head + yaml.safe_dump(twin(config), sort_keys=False, width=99)


def _experts(values: dict[str, Any]) -> dict[str, Any]:
    """Fewer choices; groups of two experts where a token is limited to some of its groups."""
    if not values.get("num_experts"):
        return {}
    limited = (values.get("moe_router_num_groups") or 1) > 1
    groups = {"moe_router_num_groups": 4, "moe_router_group_topk": 2} if limited else {}
    return {"moe_router_topk": min(values.get("moe_router_topk", 2), 4)} | groups


def _parallel(values: dict[str, Any]) -> dict[str, Any]:
    sizes = {
        key: min(values.get(key) or 1, 2)
        for key in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "expert_model_parallel_size",
        )
    }
    tp, pp, _ = sizes.values()
    mbs = min(values.get("micro_batch_size") or 1, 2)
    batch = RANKS // (tp * pp) * mbs * MICROBATCHES
    return sizes | {"micro_batch_size": mbs, "global_batch_size": batch}


def _recompute(values: dict[str, Any]) -> dict[str, Any]:
    modules = [name for name in values.get("recompute_modules") or [] if name != "moe_act"]
    return {"recompute_modules": modules} if modules else {}


def _layers(values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """As many layers as slots of the pipeline and one more, the first dense if the config's is."""
    pp = small["pipeline_model_parallel_size"]
    words = values.get("pipeline_model_parallel_layout")
    per_stage = _slots(words) // values["pipeline_model_parallel_size"] if words else 1
    vp = min(per_stage, 2)
    layers = pp * vp + 1
    freq = small.get("moe_layer_freq", 1)
    dense = 1 if str(freq).startswith("([0]") else 0
    kinds = [0] * dense + [1] * (layers - dense)
    made: dict[str, Any] = {"num_layers": layers}
    if small.get("num_experts"):
        made["moe_layer_freq"] = kinds
    if words:
        shape = from_config.of_values(small | made, "twin", "the twin")
        made["pipeline_model_parallel_layout"] = pipeline.layout(shape, pp, vp, SEQ)
    return made


def _slots(layout: str) -> int:
    """Slots of Megatron's layout string, repeats unfolded."""
    unfolded = re.sub(r"\(([^)]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), layout)
    return unfolded.rstrip("|").count("|") + 1
