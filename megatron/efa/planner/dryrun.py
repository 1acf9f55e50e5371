"""One rank of a real job on a laptop: real arguments, fake process groups, the model on `meta`.

What comes out is what the cluster would have given: Megatron's own checks of the arguments, its own
modules with their parameters, and which ranks every group of this rank holds. Kernels that are not
installed here (Transformer Engine's) are replaced by Megatron's plain modules, which have the same
parameters; nothing is computed.
"""

import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from megatron.efa import cpu, refusal
from megatron.efa.config.compose import compose
from megatron.efa.config.words import split
from megatron.efa.errors import EfaError
from megatron.efa.planner.memory import States

REPLACED = ("moe_grouped_gemm", "fp8", "fp4", "cross_entropy_loss_fusion", "masked_softmax_fusion")
"""Fields of the model's config that choose kernels and leave parameters as they are."""

DUPLICATED = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
"""Whole on every tensor rank with Transformer Engine, split by Megatron's plain modules
(multi_latent_attention.py)."""

GROUPS = ("tp", "cp", "dp", "dp_cp", "pp", "ep", "expt_tp", "expt_dp")


@dataclass
class RankReport:
    """What one rank holds; sizes in elements or bytes as named."""

    rank: int
    pipeline_stage: int
    layers: list[int]
    """Numbers (from 0) of this rank's decoder layers."""
    mtp_layers: int
    embedding: bool
    output: bool
    experts: int
    """Routed experts of one MoE layer on this rank."""
    parameters: int
    expert_parameters: int
    buffers: int
    split_parameters: int
    """Those outside experts of which a tensor rank holds a part."""
    modules: dict[str, int]
    """Parameters by module, those of a layer summed over the layers."""
    groups: dict[str, list[int]] = field(default_factory=dict)
    """Ranks of this rank's groups."""
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class DryRun:
    """A job's arguments, and reports of the ranks that were built."""

    args: Namespace
    ranks: list[RankReport]
    total_parameters: int
    """Of the whole model, counted from the built ranks; 0 unless every stage was built."""


@contextmanager
def _as_rank(rank: int, world: int) -> Iterator[None]:
    """The environment of `rank`; put back afterwards."""
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0}
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def flags_of(argv: Sequence[str]) -> list[str]:
    """Megatron's flags for a command line of pretrain_gpt.py (YAML, overrides, flags)."""
    words = split(argv)
    settings = compose(words.config, words.overrides)
    parser, arguments = _arguments()
    flags = [word for setting in settings for word in arguments.of(setting)] + words.flags
    parser.parse_args(flags)
    return flags


@cache
def _arguments() -> tuple[Any, Any]:
    from megatron.efa.arguments import NOT_IN_YAML, build_parser
    from megatron.efa.config.flags import Flags

    parser = build_parser()
    return parser, Flags(parser, hidden=NOT_IN_YAML)


def start() -> None:
    """Redirect CUDA to the CPU, so that Megatron starts on a laptop. Before it is imported."""
    os.environ.setdefault("NO_VCS_VERSION", "1")
    cpu.enable()


def parse(flags: Sequence[str], rank: int, world: int) -> Namespace:
    """Megatron's own arguments of `rank`, checked by it. Raises EfaError with its refusal."""
    from megatron.efa.arguments import add_efa_arguments
    from megatron.training.arguments import parse_args, validate_args

    kept = sys.argv
    sys.argv = ["pretrain_gpt.py", *flags, "--fake-process-group"]
    try:
        with _as_rank(rank, world), _as_gpu(), _quiet(), refusal.as_sentences():
            args = parse_args(add_efa_arguments)
            args.world_size, args.rank = world, rank
            validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    finally:
        sys.argv = kept
    return args


@contextmanager
def _quiet() -> Iterator[None]:
    with (
        open(os.devnull, "w") as nothing,
        redirect_stdout(nothing),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextmanager
def _as_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Let Megatron's checks see the job's GPU and Transformer Engine, not this machine's."""
    import torch

    from megatron.core.transformer import transformer_config

    kept = torch.cuda.get_device_capability, transformer_config.is_te_min_version
    torch.cuda.get_device_capability = lambda device=None: capability
    transformer_config.is_te_min_version = lambda *version, **more: True
    try:
        yield
    finally:
        torch.cuda.get_device_capability, transformer_config.is_te_min_version = kept


def build(args: Namespace, rank: int, world: int) -> tuple[list[Any], Any]:
    """(model chunks on `meta`, process groups) of `rank`; `stop` ends the groups."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.dist_utils import build_virtual_pipeline_stages

    args.rank = rank
    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    make_groups(args)
    model_parallel_cuda_manual_seed(args.seed)
    config = gpt_config_from_args(args)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    _plain(config)
    builder = config.get_builder_cls()(config)
    with torch.device("meta"):
        model = build_virtual_pipeline_stages(
            builder.build_model,
            groups,
            config.transformer.virtual_pipeline_model_parallel_size,
            ModelType.encoder_or_decoder,
        )
    return model, groups


def make_groups(args: Namespace) -> None:
    """The job's process groups, in the world that torch.distributed has."""
    from megatron.core import parallel_state as mpu

    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
        order="tp-cp-ep-dp-pp" if not args.use_tp_pp_dp_mapping else "tp-cp-ep-pp-dp",
    )


def _plain(config: Any) -> None:
    """Choose Megatron's plain modules instead of kernels: the parameters are the same."""
    transformer = config.transformer
    transformer.transformer_impl = "local"
    transformer.moe_grouped_gemm = False
    transformer.fp8 = transformer.fp4 = None
    transformer.context_parallel_size = 1
    transformer.moe_token_dispatcher_type = "alltoall"
    transformer.use_cpu_initialization = False
    transformer.perform_initialization = False
    transformer.init_model_with_meta_device = True


def stop() -> None:
    """End the groups of `build`."""
    import torch

    from megatron.core import parallel_state as mpu

    mpu.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _module_of(name: str) -> str:
    """`decoder.layers.3.mlp.experts.local_experts.0.linear_fc1.weight` -> `mlp.experts`."""
    parts = [part for part in name.split(".") if not part.isdigit()]
    if parts[0] == "decoder" and "layers" in parts:
        return ".".join(parts[2:4])
    return ".".join(parts[:2]) if parts[0] == "mtp" else parts[0]


def report(
    model: list[Any], groups: Any, args: Namespace, rank: int, plain: bool = False
) -> RankReport:
    """What the built chunks of `rank` hold; `plain`: the job itself asks for Megatron's modules."""
    import torch

    modules: dict[str, int] = {}
    total = expert = split = buffers = 0
    layers: list[int] = []
    mtp = experts = 0
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            key = _module_of(name)
            whole_here = not plain and any(part in name for part in DUPLICATED)
            size = parameter.numel() * (args.tensor_model_parallel_size if whole_here else 1)
            modules[key] = modules.get(key, 0) + size
            total += size
            if not getattr(parameter, "allreduce", True) or ".experts." in name:
                expert += size
            elif not whole_here and getattr(parameter, "tensor_model_parallel", False):
                split += size
        buffers += sum(b.numel() for b in chunk.buffers())
        decoder = getattr(chunk, "decoder", None)
        layers += [layer.layer_number - 1 for layer in getattr(decoder, "layers", ())]
        if getattr(chunk, "mtp", None) is not None:
            mtp += len(chunk.mtp.layers)
        for module in chunk.modules():
            experts = max(experts, getattr(module, "num_local_experts", 0) or 0)
    ranks = {
        name: torch.distributed.get_process_group_ranks(getattr(groups, name))
        for name in GROUPS
        if getattr(groups, name, None) is not None
    }
    dense_group, expert_group = len(ranks["dp_cp"]), len(ranks.get("expt_dp", [0]))
    weights, gradients, optimizer = states_of(args).split(
        total - expert, expert, dense_group, expert_group
    )
    return RankReport(
        rank=rank,
        pipeline_stage=ranks["pp"].index(rank),
        layers=sorted(layers),
        mtp_layers=mtp,
        embedding=any(name.startswith("embedding") for name in modules),
        output="output_layer" in modules,
        experts=experts if expert else 0,
        parameters=total,
        expert_parameters=expert,
        buffers=buffers,
        modules=modules,
        groups=ranks,
        split_parameters=split,
        weight_bytes=round(weights),
        gradient_bytes=round(gradients),
        optimizer_bytes=round(optimizer),
    )


def run(argv: Sequence[str], world: int, ranks: Sequence[int] | None = None) -> DryRun:
    """Build `ranks` of the job (None: one of each pipeline stage, which covers all that differ).

    Ranks of one stage hold equal shapes whatever their place in the other axes.
    """
    start()
    flags = flags_of(argv)
    args = parse(flags, 0, world)
    size = args.pipeline_model_parallel_size
    every = ranks is None
    plain = "--transformer-impl" in flags and "local" in flags
    stages = [stage * (world // size) for stage in range(size)]
    if args.use_tp_pp_dp_mapping:
        stages = [stage * args.tensor_model_parallel_size for stage in range(size)]
    reports = []
    for rank in stages if ranks is None else ranks:
        if not 0 <= rank < world:
            raise EfaError(f"--rank {rank}: a job of {world} ranks has 0 to {world - 1}")
        try:
            with _as_rank(rank, world), _as_gpu(), _quiet(), refusal.as_sentences():
                model, groups = build(args, rank, world)
                reports.append(report(model, groups, args, rank, plain))
        finally:
            stop()
    # What the job will run, whatever stood in for it here.
    args.transformer_impl = "local" if plain else "transformer_engine"
    return DryRun(args, reports, whole(args, reports) if every else 0)


def whole(args: Namespace, reports: Sequence[RankReport]) -> int:
    """Parameters of the whole model, from one rank of every stage.

    Modules that tensor parallelism does not split (norms, routers, latent down-projections) are on
    every tensor rank and count once.
    """
    expert = sum(r.expert_parameters for r in reports)
    expert *= args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1)
    dense = sum(r.parameters - r.expert_parameters for r in reports)
    split = sum(r.split_parameters for r in reports)
    total = expert + dense + split * (args.tensor_model_parallel_size - 1)
    # MTP's stage embeds tokens with a copy of the first stage's table.
    copies = sum(r.modules.get("embedding", 0) for r in reports if r.pipeline_stage)
    return total - copies * args.tensor_model_parallel_size


def states_of(args: Namespace) -> States:
    """Bytes per parameter under these arguments (distrib_optimizer.py, optimizer_config.py)."""
    import torch

    def size(name: str) -> int:
        kind = getattr(args, name, torch.float32)
        return torch.empty((), dtype=kind).element_size() if isinstance(kind, torch.dtype) else 4

    half = args.bf16 or args.fp16
    moments = size("exp_avg_dtype") + size("exp_avg_sq_dtype")
    master = size("main_params_dtype")
    reduced = getattr(args, "accumulate_allreduce_grads_in_fp32", True)
    if not getattr(args, "use_precision_aware_optimizer", False):
        master, moments = 4, 8
    return States(
        weight=2 if half else 4,
        gradient=4 if reduced or not half else 2,
        master=master if half else 0,
        moments=moments,
        sharded=args.use_distributed_optimizer,
    )
