"""Token dispatchers as arms of one comparison: upstream's own, and ours, on the same groups."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

UPSTREAM = ("alltoall", "allgather")
OURS = "hierarchical"


@dataclass(frozen=True)
class Arm:
    """One dispatcher; `chunks` None leaves the choice to it."""

    dispatcher: str
    chunks: int | None = None

    def __str__(self) -> str:
        return self.dispatcher + ("" if self.chunks is None else f", {self.chunks} chunks")


def arms(names: list[str], chunks: list[int]) -> list[Arm]:
    """Arms to compare, in this order; ours once for each number of chunks (0: its own choice)."""
    made = []
    for name in names:
        made += [Arm(name, n or None) for n in chunks] if name == OURS else [Arm(name)]
    return made


def groups() -> Any:
    """Megatron's groups with the expert group over all ranks, as a training job would have them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    return ProcessGroupCollection.use_mpu_process_groups()


def build(arm: Arm, experts: int, topk: int, hidden: int, dtype: torch.dtype, pg: Any) -> Any:
    """The dispatcher of one expert layer on this rank, as `MoELayer` makes it."""
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    world, rank = dist.get_world_size(), dist.get_rank()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=hidden,
        expert_model_parallel_size=world,
        moe_token_dispatcher_type=arm.dispatcher,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        add_bias_linear=False,
    )
    local = experts // world
    indices = list(range(rank * local, (rank + 1) * local))
    kind = {
        "alltoall": "MoEAlltoAllTokenDispatcher",
        "allgather": "MoEAllGatherTokenDispatcher",
    }[arm.dispatcher]
    return getattr(token_dispatcher, kind)(local, indices, config, pg_collection=pg)
