"""Token dispatchers as arms of one comparison: upstream's own, and ours, on the same groups."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa.errors import EfaError

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
    """The dispatcher that `MoELayer` makes on this rank. Raises EfaError if it knows none such."""
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=hidden,
        expert_model_parallel_size=dist.get_world_size(),
        moe_token_dispatcher_type=arm.dispatcher,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        add_bias_linear=False,
    )
    parts = MoESubmodules(experts=_nothing, router=_nothing)
    try:
        dispatcher = MoELayer(config, parts, pg_collection=pg).token_dispatcher
    except ValueError as error:
        if arm.dispatcher not in str(error):
            raise
        raise EfaError(
            f"--dispatchers: this checkout has no dispatcher {arm.dispatcher}: there are "
            f"{', '.join(UPSTREAM)}"
        ) from error
    if arm.chunks is not None:
        if not hasattr(dispatcher, "chunks"):
            raise EfaError(f"--chunks: the dispatcher {arm.dispatcher} is not cut into chunks")
        dispatcher.chunks = arm.chunks
    return dispatcher


def _nothing(*_: Any, **__: Any) -> None:
    """Stands for a layer's router and experts, which the benchmark brings itself."""
