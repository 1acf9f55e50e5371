"""The least entry point that trains a GPT with Megatron: the same on upstream and on the fork.

Reads nothing of ours but the CPU redirection, so a difference between two trees is theirs alone.
"""

import functools

import torch

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage

FIELDS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def has_mtp(vp_stage=None):
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator, vp_stage):
    args = get_args()
    mtp = has_mtp(vp_stage)
    if not is_first_or_last_pipeline_stage(vp_stage) and not mtp:
        return dict.fromkeys(FIELDS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        sample = next(data_iterator)
        batch = {k: None if sample.get(k) is None else sample[k].cuda() for k in FIELDS}
        batch |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size"))
    return get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )


def loss_func(loss_mask, output):
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator, model, return_schedule_plan=False):
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    inputs = [batch[k] for k in ("tokens", "position_ids", "attention_mask")]
    forward = model.build_schedule_plan if return_schedule_plan else model
    output = forward(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, functools.partial(loss_func, batch["loss_mask"])


def datasets_provider(samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        blend_per_split=None,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )

    def is_built():
        first_or_last = is_first_or_last_pipeline_stage(vp_stage)
        return mpu.get_tensor_model_parallel_rank() == 0 and (first_or_last or has_mtp(vp_stage))

    return BlendedMegatronDatasetBuilder(MockGPTDataset, samples, is_built, config).build()


datasets_provider.is_distributed = True


def embedding_ranks(pp_ranks):
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks |= set(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def train():
    """Train as sys.argv says."""
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=embedding_ranks,
    )
