"""What Megatron's layers and its step cost the host: real ones, too small for anything else."""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FEW = 4
"""Experts of a rank."""
_MOST = 64
"""Ranks that share experts."""
_LEAST = 1e-6
"""Seconds, for differences that noise makes negative."""

_TINY = shlex.split(
    "--hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 128 "
    "--use-distributed-optimizer --clip-grad 1"
)
_EXPERTS = shlex.split(
    "--moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)


@dataclass(frozen=True)
class Host:
    """Seconds, the slowest rank's."""

    block: float
    """Of an attention block."""
    moe_block: float
    """Of a mixture of experts, the experts aside and nothing sent."""
    expert: float
    """Of each expert that a rank holds: many where experts run one after the other."""
    step: float
    """Of a step beside its layers."""
    dispatch: tuple[tuple[str, float], ...]
    """By dispatcher: what a mixture of experts takes longer when ranks (up to 64) share its experts
    and send hardly anything: exchanges of counts and of almost empty messages, and their plans."""


def measure(precision: str, seconds: Callable[[Callable[[], Any]], float]) -> Host:
    """Time tiny models; `seconds(call)`: the slowest rank's time of a call.

    A dense layer counts as one and a half attention blocks, one with experts as a block and the
    experts, as `work` counts them.
    """
    import torch.distributed as dist

    one, _ = _times(precision, ["--num-layers", "1"], seconds)
    three, step = _times(precision, ["--num-layers", "3"], seconds)
    layer = max((three - one) / 2, _LEAST)
    block = layer / 1.5

    def moe(experts: int, ranks: int = 1, dispatcher: str = "alltoall") -> float:
        flags = ["--num-experts", str(experts), "--expert-model-parallel-size", str(ranks)]
        flags += ["--moe-token-dispatcher-type", dispatcher, *_EXPERTS, "--num-layers", "3"]
        whole, _ = _times(precision, flags, seconds)
        return (whole - three) / 3 + layer - block

    few, many = moe(_FEW), moe(4 * _FEW)
    each = max((many - few) / (3 * _FEW), _LEAST)
    alone = max(few - _FEW * each, _LEAST)
    ranks = math.gcd(dist.get_world_size(), _MOST)
    dispatch = tuple(
        (name, max(moe(_FEW * ranks, ranks, name) - few, _LEAST))
        for name in ("alltoall", "hierarchical")
        if ranks > 1
    )
    return Host(block, alone, each, max(step - 3 * layer, _LEAST), dispatch)


def _times(
    precision: str, flags: list[str], seconds: Callable[[Callable[[], Any]], float]
) -> tuple[float, float]:
    """(seconds of a microbatch's forward and backward, of a whole step) of a tiny model."""
    import importlib.util

    import torch
    import torch.distributed as dist

    from megatron.core import parallel_state as mpu
    from megatron.efa import cpu
    from megatron.efa.planner import dryrun

    local = cpu.enabled() or importlib.util.find_spec("transformer_engine") is None
    words = [*_TINY, *flags, "--global-batch-size", str(dist.get_world_size())]
    words += ["--bf16"] if precision == "bf16" else []
    if local:
        words += ["--transformer-impl", "local", "--attention-backend", "unfused"]
    elif "--num-experts" in flags:
        words.append("--moe-grouped-gemm")
    args = dryrun.parse(words, dist.get_rank(), dist.get_world_size())
    dryrun.make_groups(args)
    try:
        model, optimizer = _job(args)
        device = torch.device("cpu") if cpu.enabled() else torch.device("cuda")
        tokens = torch.randint(0, 127, (1, args.seq_length), device=device)
        places = torch.arange(args.seq_length, device=device)[None]

        def microbatch() -> None:
            model(tokens, places, None, labels=tokens).sum().backward()

        def step() -> None:
            from megatron.core.distributed import finalize_model_grads

            model.zero_grad_buffer()
            optimizer.zero_grad()
            microbatch()
            finalize_model_grads([model])
            optimizer.step()

        return seconds(microbatch), seconds(step)
    finally:
        mpu.destroy_model_parallel()


def _job(args: Any) -> tuple[Any, Any]:
    """(model, optimizer) as the training loop makes them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.training.argument_utils import gpt_config_from_args

    model_parallel_cuda_manual_seed(args.seed)
    config = gpt_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = config.get_builder_cls()(config).build_model(
        groups, pre_process=True, post_process=True
    )
    model = model.cuda()
    if args.bf16:
        model = Float16Module(model.config, model)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16, overlap_grad_reduce=False, use_distributed_optimizer=True
    )
    model = DistributedDataParallel(model.config, settings, model)
    choice = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=args.bf16, clip_grad=1.0, use_distributed_optimizer=True
    )
    return model, get_megatron_optimizer(choice, [model], use_gloo_process_groups=False)
