"""The switches of the expert path, and what its arguments must satisfy."""

import importlib.util
import logging
from argparse import Namespace
from typing import Any

import torch

from megatron.efa import groups
from megatron.efa.cluster.current import current
from megatron.efa.comm.choose import costs_of
from megatron.efa.errors import EfaError
from megatron.efa.expert import choose
from megatron.efa.expert.choose import MOST_CHUNKS
from megatron.efa.expert.place import PURPOSE, Place
from megatron.efa.groups.shape import Shape, shape_of

__all__ = ["MOST_CHUNKS", "check", "chunks", "chunks_for", "configure", "fp8"]

_log = logging.getLogger(__name__)

NAME = "hierarchical"
MOST_EXPERTS = torch.iinfo(torch.int16).max
"""Experts are numbered in 16 bits on the wire."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_chunks: int | None = None
_fp8 = False


def configure(args: Namespace) -> None:
    """Do from now on as Megatron's `args` say, and replace `auto` in them by what it chooses.

    Before process groups are made. Raises EfaError for what the dispatcher cannot do.
    """
    global _chunks, _fp8
    _chunks = getattr(args, "efa_expert_chunks", None)
    _fp8 = getattr(args, "efa_dispatch_dtype", "bf16") == "fp8"
    if _chunks is not None and _chunks < 1:
        raise EfaError(f"--efa-expert-chunks {_chunks}: tokens are sent in 1 chunk or more")
    if not args.num_experts:
        return
    if args.moe_token_dispatcher_type == "auto":
        args.moe_token_dispatcher_type, why = _choose(args)
        if args.rank == 0:
            print(
                f"> --moe-token-dispatcher-type auto: {args.moe_token_dispatcher_type}, since {why}"
            )
    if args.moe_token_dispatcher_type == NAME:
        groups.expect("ep", PURPOSE)
        _report(args)
    elif _fp8:
        raise EfaError(
            "--efa-dispatch-dtype fp8 is the hierarchical dispatcher's, and this run has "
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}: give one of the two up"
        )


def chunks() -> int | None:
    """What --efa-expert-chunks says; None for as many as messages are large enough for."""
    return _chunks


def fp8() -> bool:
    """Whether tokens travel in e4m3 on the way to their experts."""
    return _fp8


def chunks_for(place: Place, size: int, gpu: bool) -> int:
    """Chunks for `size` bytes of tokens of a rank."""
    if place.two is None:
        return 1
    return choose.chunks_of(place.nodes, size, costs_of(place.per_node, gpu))


def check(config: Any) -> None:
    """Raise ValueError if a TransformerConfig asks the dispatcher for what it cannot do.

    Configs are made anew many times a start: this is cheap and silent.
    """
    if config.moe_token_dispatcher_type != NAME:
        return
    if (config.num_moe_experts or 0) > MOST_EXPERTS:
        raise ValueError(
            f"--num-experts {config.num_moe_experts}: the hierarchical dispatcher numbers experts "
            f"in 16 bits, which is up to {MOST_EXPERTS}"
        )
    if config.moe_router_dtype == "fp64":
        raise ValueError(
            "--moe-router-dtype fp64: the hierarchical dispatcher sends weights in fp32 at most; "
            "use fp32"
        )
    modules = {getattr(module, "name", str(module)) for module in config.cuda_graph_modules or ()}
    if config.cuda_graph_impl != "none" and (not modules or modules & {"moe", "moe_preprocess"}):
        raise ValueError(
            "CUDA graphs of the MoE dispatch: the hierarchical dispatcher reads counts on the host;"
            " leave moe and moe_preprocess out of --cuda-graph-modules"
        )


def _choose(args: Namespace) -> tuple[str, str]:
    shape = _shape(args)
    gpu = torch.cuda.is_available() and args.distributed_backend != "gloo"
    if shape.nodes == 1 and gpu and importlib.util.find_spec("deep_ep") is not None:
        return "flex", "an expert group lies in one node, and DeepEP is installed"
    if not shape.even:
        return NAME, "an expert group lies unevenly on its nodes, and a rank gets a token once"
    layer = _layer(args, shape)
    return choose.better(layer, costs_of(shape.per_node, gpu))


def _layer(args: Namespace, shape: Shape) -> choose.Layer:
    tokens = args.seq_length * args.micro_batch_size / args.context_parallel_size
    if args.sequence_parallel:
        tokens /= args.tensor_model_parallel_size
    width = getattr(args, "moe_latent_size", None) or args.hidden_size
    limited = args.moe_router_group_topk if args.moe_router_num_groups == shape.nodes else None
    return choose.Layer(
        shape.nodes,
        shape.per_node,
        args.num_experts,
        args.moe_router_topk,
        tokens * width * (2 if args.bf16 or args.fp16 else 4),
        limited or 0,
    )


def _shape(args: Namespace) -> Shape:
    """How the first expert-parallel group lies: expert tensor parallelism varies before it."""
    within = args.expert_tensor_parallel_size or 1
    ranks = range(0, args.expert_model_parallel_size * within, within)
    return shape_of(ranks, current().domain_of)


def _report(args: Namespace) -> None:
    """Say how expert groups lie, and warn where the router's groups of experts are not nodes."""
    if args.rank != 0:
        return
    shape, routed = _shape(args), args.moe_router_num_groups
    lie = f"{shape.nodes} nodes of {shape.per_node} ranks" if shape.even else "uneven nodes"
    print(
        f"> experts over {lie}, dispatched in "
        f"{f'{_chunks} chunks' if _chunks else f'up to {MOST_CHUNKS} chunks'}"
        f"{' in e4m3' if _fp8 else ''}"
    )
    if shape.nodes > 1 and routed and routed != shape.nodes:
        _log.warning(
            f"--moe-router-num-groups {routed} limits a token to {args.moe_router_group_topk} "
            f"groups of experts, but an expert group spans {shape.nodes} nodes: with as many "
            "groups as nodes a token would cross the network no more often than that"
        )
