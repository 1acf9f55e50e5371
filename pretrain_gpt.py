"""Pretrain or fine-tune a GPT with Megatron's flags, YAML, or both (docs/config.md).

torchrun --nproc-per-node 8 pretrain_gpt.py --config examples/mock.yaml train.train_iters=50
"""

import sys
import time
from typing import Any

STARTED = time.time()

from megatron.efa import entry  # noqa: E402  (the clock starts before the imports)


def configure() -> Any:
    """Parse and validate Megatron's flags; return the configs that `pretrain` takes."""
    from megatron.efa import data, expert, gpt, groups, pipeline, tensor, traffic
    from megatron.efa.arguments import add_efa_arguments
    from megatron.efa.cluster import current, ranks
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(
        add_efa_arguments, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
    )
    current.configure(args)
    ranks.configure(args)  # first: from here on this process may be another rank
    gpt.check(args)
    data.configure(args)
    expert.configure(args)
    pipeline.configure(args)
    tensor.configure(args)
    groups.configure(args)
    traffic.configure(args)
    return pretrain_cfg_container_from_args(args, gpt_config_from_args(args))


def train(container: Any) -> None:
    """Hand model, data and step to upstream's training loop."""
    import torch

    from megatron.core.enums import ModelType
    from megatron.efa import gpt
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps

    set_startup_timestamps(program_start=STARTED, main_entry=time.time())
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    pretrain(
        container,
        gpt.datasets,
        ModelType.encoder_or_decoder,
        gpt.forward_step,
        get_embedding_ranks=gpt.embedding_ranks,
        store=store,
    )
    if torch.distributed.is_initialized():  # else NCCL warns of leaked communicators
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(entry.run(configure, train, sys.argv[1:]))
