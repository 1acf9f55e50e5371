"""A model's dimensions from a config that `pretrain_gpt.py` takes."""

import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.efa.config.compose import compose
from megatron.efa.errors import EfaError
from megatron.efa.planner.layout import DISPATCHERS, Job
from megatron.efa.planner.shape import Shape

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")


def shape_of(path: Path, overrides: Sequence[str] = ()) -> Shape:
    """Dimensions that the config's keys and `overrides` come to.

    Raises EfaError naming a key that is missing.

    `vocab_size` may be left out where a tokenizer gives it; it then counts as 128,000.
    """
    values = {setting.key: setting.value for setting in compose(str(path), overrides)}
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise EfaError(f"--model {path}: no {', '.join(missing)}, without which it is no model")
    if any(key.startswith("mamba") or key.startswith("hybrid") for key in values):
        raise EfaError(f"--model {path}: hybrids are planned by their published names only")
    return of_values(values, path.stem, f"--model {path}")


def of_args(args: Namespace) -> tuple[Shape, Job]:
    """Dimensions and layout of Megatron's parsed and checked arguments. Raises EfaError."""
    values = vars(args) | {"vocab_size": args.padded_vocab_size or args.vocab_size}
    return of_values(values, "this model", "arguments"), job_of(args)


def job_of(args: Namespace) -> Job:
    """The layout of Megatron's parsed and checked arguments."""
    modules = args.recompute_modules or ["core_attn"]
    kinds = {None: (), "full": ("full",), "selective": modules}
    low = "fp8" if getattr(args, "fp8", None) else "fp4" if getattr(args, "fp4", None) else None
    stages = args.pipeline_model_parallel_size
    exchange = "library" if args.moe_token_dispatcher_type == "flex" else "alltoall"
    if args.moe_token_dispatcher_type in DISPATCHERS:
        exchange = args.moe_token_dispatcher_type
    return Job(
        gpus=args.world_size,
        seq=args.seq_length,
        gbs=args.global_batch_size,
        mbs=args.micro_batch_size,
        tp=args.tensor_model_parallel_size,
        pp=stages,
        vp=args.virtual_pipeline_model_parallel_size or 1,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or 1,
        precision=low or ("bf16" if args.bf16 or args.fp16 else "fp32"),
        recompute=frozenset(kinds[args.recompute_granularity]),
        dispatcher=exchange,
        ep_overlap=args.overlap_moe_expert_parallel_comm,
        implementation=args.transformer_impl,
    )


def of_values(values: dict[str, Any], name: str, where: str) -> Shape:
    """Dimensions that Megatron's arguments `values` come to. Raises EfaError naming `where`."""
    heads, hidden, layers = (
        values[k] for k in ("num_attention_heads", "hidden_size", "num_layers")
    )
    latent = bool(values.get("multi_latent_attention"))
    experts = values.get("num_experts") or 0
    moe = _pattern(values.get("moe_layer_freq", 1), layers, where) if experts else [0] * layers
    ffn = values.get("ffn_hidden_size") or 4 * hidden
    grouped = values.get("group_query_attention")
    return Shape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=values.get("vocab_size") or 128_000,
        kv=0 if latent else (values.get("num_query_groups", 1) if grouped else heads),
        head_dim=values.get("kv_channels") or hidden // heads,
        ffn=ffn,
        gated=bool(values.get("swiglu")),
        dense=layers - sum(moe) if experts else 0,
        q_lora=(values.get("q_lora_rank") or -1) if latent else 0,
        kv_lora=values.get("kv_lora_rank", 32) if latent else 0,
        qk_nope=values.get("qk_head_dim", 128) if latent else 0,
        qk_rope=values.get("qk_pos_emb_head_dim", 64) if latent else 0,
        v_dim=values.get("v_head_dim", 128) if latent else 0,
        experts=experts,
        topk=values.get("moe_router_topk", 2) if experts else 0,
        expert_ffn=(values.get("moe_ffn_hidden_size") or ffn) if experts else 0,
        shared_ffn=values.get("moe_shared_expert_intermediate_size") or 0,
        groups=values.get("moe_router_num_groups") or 0,
        group_topk=values.get("moe_router_group_topk") or 0,
        mtp=values.get("mtp_num_layers") or 0,
        qk_norm=bool(values.get("qk_layernorm")) and not latent,
        tied=not values.get("untie_embeddings_and_output_weights", False),
    )


def _pattern(freq: Any, layers: int, where: str) -> list[int]:
    """1 for each MoE layer, from a number, a list, or Megatron's `([0]*3+[1]*58)`."""
    if isinstance(freq, str) and re.fullmatch(r"[\d\s\[\]*+(),]+", freq):
        parts = re.findall(r"\[(\d)\](?:\*(\d+))?", freq)
        freq = [int(kind) for kind, count in parts for _ in range(int(count or 1))]
    if isinstance(freq, int):
        freq = [1 if i % freq == 0 else 0 for i in range(layers)]
    if not isinstance(freq, list) or len(freq) != layers or sorted(freq) != freq:
        raise EfaError(
            f"{where}: moe_layer_freq must have one entry a layer, dense layers first, "
            "for the planner"
        )
    return freq
