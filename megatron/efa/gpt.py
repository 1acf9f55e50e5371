"""Data, training step and loss of a GPT, as upstream's `pretrain` wants them.

Shapes: b microbatch, s sequence, n documents in a packed sequence.
"""

import importlib.util
import json
from argparse import Namespace
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.efa import missing
from megatron.efa.errors import EfaError
from megatron.training import get_args, get_timers
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, Any]

SPIKE = 10
"""A loss this many times the largest one seen is a spike (`--check-for-spiky-loss`)."""

_TENSORS = (
    "tokens",  # [b, s]
    "labels",  # [b, s]
    "loss_mask",  # [b, s]
    "position_ids",  # [b, s]
    "attention_mask",  # [b, 1, s, s]
    "cu_seqlens",  # [b, n + 1], where documents start
    "cu_seqlens_padded",  # [b, n + 1], the same with the padding of context parallelism
    "max_seqlen",  # [b]
    "local_cp_size",  # [1]
)

_SAME_NAMES = (
    "allow_ambiguous_pad_tokens",
    "context_parallel_size",
    "data_parallel_size",
    "eod_mask_loss",
    "full_validation",
    "hybrid_context_parallel",
    "mid_level_dataset_surplus",
    "mmap_bin_files",
    "multiple_validation_sets",
    "num_dataset_builder_threads",
    "object_storage_cache_path",
    "reset_attention_mask",
    "reset_position_ids",
    "split",
)
"""Arguments that the dataset's config calls as the command line does."""

_straggler = StragglerDetector()


def check(args: Namespace) -> None:
    """Raise EfaError if what `args` ask of the layers or the data, or leave out, cannot run here.

    Upstream's own checks of the data's arguments run here too, before any process group is made.
    """
    missing.check(args)
    if (
        args.transformer_impl == "transformer_engine"
        and args.spec is None
        and importlib.util.find_spec("transformer_engine") is None
    ):
        raise EfaError(
            "--transformer-impl transformer_engine, which is Megatron's default, needs Transformer "
            "Engine, which is not installed here: give --transformer-impl local, or install it"
        )
    packs = "--sft" if args.sft else "--dataloader-inter-document-masking"
    if _packed(args) and args.transformer_impl == "local":
        raise EfaError(
            f"{packs} packs documents into one sequence, which only Transformer Engine's attention "
            "computes: install Transformer Engine and leave out --transformer-impl local"
        )
    if args.sft and importlib.util.find_spec("datasets") is None:
        raise EfaError("--sft reads JSONL with the package `datasets`: run `pip install datasets`")
    config = dataset_config()
    if args.rank == 0:  # it reads data in every layout; another node may do without
        for blend in (config.blend, *(config.blend_per_split or ())):
            for prefix in blend[0] if blend else ():
                _check_data(prefix, ("",) if args.sft else (".idx", ".bin"))


def _check_data(prefix: str, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        if "://" not in prefix and not Path(prefix + suffix).is_file():
            advice = ", which is written without .bin and .idx" if suffix else ""
            raise EfaError(f"there is no file {prefix}{suffix} for the data path {prefix}{advice}")


def forward_step(
    data: Iterator[Batch], model: torch.nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, partial]:
    """Run one microbatch; return the losses [b, s] (or a schedule plan) and the loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler(bdata=True):
        config = get_attr_wrapped_model(model, "config")
        batch = get_batch(data, config, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    packing = _packing(batch, get_args().seq_length)
    inputs = [batch[name] for name in ("tokens", "position_ids", "attention_mask")]
    targets = {name: batch[name] for name in ("labels", "loss_mask")}
    with _straggler:
        if return_schedule_plan:
            output = model.build_schedule_plan(*inputs, **targets)
        else:
            output = model(*inputs, **targets, packed_seq_params=packing)
    return output, partial(loss, batch["loss_mask"], model=model)


def get_batch(data: Iterator[Batch], config: TransformerConfig, vp_stage: int | None) -> Batch:
    """Return this rank's part of the next microbatch; a field that its stage does not use is None.

    The first rank of a tensor-parallel group reads and broadcasts it; context parallelism then cuts
    it along s.
    """
    args = get_args()
    packed = _packed(args)
    has_mtp = _has_mtp(config, vp_stage)
    embeds_or_predicts = is_first_or_last_pipeline_stage(vp_stage) or has_mtp
    if not embeds_or_predicts and not packed:
        return dict.fromkeys((*_TENSORS, "hybrid_cp_group"))
    batch: Batch = {}
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        read = next(data)
        batch = {k: read[k].cuda(non_blocking=True) if k in read else None for k in _TENSORS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if embeds_or_predicts:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=args.hybrid_context_parallel,
            cp_group=parallel_state.get_context_parallel_group(),
            hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
            use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
        )
    return dict.fromkeys((*_TENSORS, "hybrid_cp_group")) | batch


def loss(
    loss_mask: torch.Tensor, losses: torch.Tensor, model: torch.nn.Module
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum a microbatch's losses [b, s] where `loss_mask` [b, s] is 1.

    Returns the sum (fp32), the number of its tokens (int32) and both in one tensor [2] for the log;
    Megatron divides, by microbatch or by all tokens of the batch (`--calculate-per-token-loss`).
    """
    args = get_args()
    if args.logits_load_dir is not None:
        total, tokens, report = _distillation()(loss_mask, losses, model=model)
    else:
        mask = loss_mask.view(-1).float()
        total = torch.sum(losses.view(-1).float() * mask)
        tokens = mask.sum().clone().detach().to(torch.int)
        report = {"lm loss": torch.cat([total.clone().detach().view(1), tokens.view(1)])}
    _check_loss(args, total)
    return total, tokens, report


def _check_loss(args: Namespace, total: torch.Tensor) -> None:
    """Let the rerun state machine find out whether a bad loss comes from the hardware."""
    machine = get_rerun_state_machine()
    # The forward pass is deterministic: a rerun must give the same sum, hence no tolerance.
    validate = partial(machine.validate_result, result=total, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for name, test in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            message = f"found {name} in local forward loss calculation"
            validate(rejection_func=test, message=message, fatal=True)
    if args.check_for_spiky_loss:
        spiky = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss")
        validate(rejection_func=spiky, message="Spiky loss", fatal=False)


@cache
def _distillation() -> Any:
    """Loss against a teacher's stored logits; the reader behind it is made once."""
    from megatron.training.distillation import LossFuncCallable

    args = get_args()
    return LossFuncCallable(
        logprobs_dir=args.logits_load_dir,
        decode_threads=args.logits_load_decode_threads,
        prefetch_factor=args.logits_load_prefetch_factor,
        msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
        kd_loss_alpha=args.logits_load_kd_loss_alpha,
        ignore_errors=args.logits_load_ignore_errors,
    )


def datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the training, validation and test sets of at least `samples` samples each.

    A rank whose stage reads no data gets None for each.
    """
    args = get_args()
    if args.sft:
        kind = SFTDataset
    elif args.mock_data:
        kind = MockGPTDataset
    else:
        kind = GPTFIMDataset if args.fim_data else GPTDataset
    read_here = partial(_reads_data, args, core_transformer_config_from_args(args), vp_stage)
    return BlendedMegatronDatasetBuilder(kind, samples, read_here, dataset_config()).build()


datasets.is_distributed = True  # upstream then calls it on every rank, not on tensor rank 0 alone


@cache
def dataset_config() -> GPTDatasetConfig:
    """Gather what the data flags say; builds the tokenizer."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    fields = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "tokenizer": build_tokenizer(args),
        "path_to_cache": args.data_cache_path,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "inter_document_masking": args.dataloader_inter_document_masking,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
    }
    for same in _SAME_NAMES:
        fields[same] = getattr(args, same)
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            fields["sequences_per_dataset"] = json.load(file)
    if not args.fim_data:
        return GPTDatasetConfig(**fields)
    for same in ["rate", "spm_rate", "split_sample", "fragment_rate", "no_prefix"]:
        fields[f"fim_{same}"] = getattr(args, f"fim_{same}")
    tokens = ("prefix", "middle", "suffix", "pad", "eod")
    marks = {name: getattr(args, f"fim_{name}_token") for name in tokens}
    return GPTFIMDatasetConfig(**fields, fim_extra_tokens=marks)


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Which ranks of a pipeline hold word embeddings: the first, the last if tied, those of MTP."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks |= set(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def _packed(args: Namespace) -> bool:
    """Whether a sample is several documents with their starts in `cu_seqlens`."""
    return args.sft or args.dataloader_inter_document_masking


def _has_mtp(config: TransformerConfig, vp_stage: int | None) -> bool:
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _reads_data(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> bool:
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return args.sft or is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(config, vp_stage)


def _packing(batch: Batch, seq_length: int) -> PackedSeqParams | None:
    """Describe the documents of a packed batch to the attention; None if it is not packed."""
    if batch["cu_seqlens"] is None:
        return None
    starts = padded = batch["cu_seqlens"].squeeze(0)
    update_seqlen_stats_from_cu_seqlens(starts)
    if batch["cu_seqlens_padded"] is not None:
        padded = batch["cu_seqlens_padded"].squeeze(0)
    longest = int(batch["max_seqlen"].item())
    local_cp_size = batch["local_cp_size"]
    # Upstream's attention wants the starts with padding in the unpadded fields too.
    extra = padded if batch["cu_seqlens_padded"] is not None else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=padded,
        cu_seqlens_kv=padded,
        cu_seqlens_q_padded=extra,
        cu_seqlens_kv_padded=extra,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if local_cp_size is None else int(local_cp_size.item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=seq_length,
    )
