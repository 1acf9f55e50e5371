"""What Megatron really saves for the backward pass: bytes by module, in forward passes on CPUs.

Each measurement is one forward pass of the job's own model in forked processes (one a rank, over
gloo). Counted are storages that saved-tensor hooks see and that are no parameters, once each, with
the size that they have when the pass has ended: recomputation empties some before.
"""

import multiprocessing
import os
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.efa.errors import EfaError
from megatron.efa.planner import activations, dryrun, from_config
from megatron.efa.planner.layout import Job
from megatron.efa.planner.shape import Shape

_PLACES = (
    # first part of a module's name that fits; the model itself computes the loss
    ("mtp", "mtp"),
    ("embedding", "embedding"),
    ("self_attention.core_attention", "core"),
    ("self_attention", "attention"),
    ("mlp.experts", "experts"),
    ("mlp", "mlp"),
    ("final_layernorm", "norms"),
    ("", "norms"),
)


@dataclass(frozen=True)
class Saved:
    """One rank's saved bytes beside what the planner says of them."""

    shape: Shape
    job: Job
    measured: dict[str, int]
    """Bytes by module (activations.MODULES)."""
    predicted: dict[str, float]

    @property
    def error(self) -> float:
        """Of the whole, relative."""
        return sum(self.predicted.values()) / sum(self.measured.values()) - 1


def preload() -> None:
    """Import torch and Megatron, redirected to the CPU, so that forked ranks need not."""
    dryrun.start()
    import torch

    import megatron.training.argument_utils  # noqa: F401
    from megatron.training.arguments import parse_args  # noqa: F401

    torch.set_num_threads(1)


def measure(flags: Sequence[str], ranks: int = 1, timeout_s: float = 120) -> Saved:
    """Run one forward pass of the job that Megatron's `flags` describe on `ranks` ranks.

    `preload` comes first. Raises EfaError if a rank fails.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank, args=(list(flags), rank, ranks, folder, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            answers = [_answer(pipe, rank, timeout_s) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return answers[0]


def _answer(pipe: Any, rank: int, timeout_s: float) -> Saved:
    try:
        good, answer = pipe.recv() if pipe.poll(timeout_s) else (False, "no answer in time")
    except EOFError:
        good, answer = False, "it ended without an answer"
    if not good:
        raise EfaError(f"rank {rank} of the forward pass failed: {answer}")
    return answer


def _rank(flags: list[str], rank: int, ranks: int, folder: str, pipe: Any) -> None:
    try:
        pipe.send((True, _forward(flags, rank, ranks, folder)))
    except BaseException as error:
        pipe.send((False, f"{error}\n{traceback.format_exc()}"))


def _forward(flags: list[str], rank: int, ranks: int, folder: str) -> Saved:
    import torch

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # every rank a node: a dispatcher sees two
    args = dryrun.parse(flags, rank, ranks)
    store = torch.distributed.FileStore(str(Path(folder) / "store"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    model = _model(args)
    sizes = _watched(model, args)
    shape, job = from_config.of_args(args)
    return Saved(shape, job, sizes, predicted(shape, job))


def _model(args: Namespace) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args

    dryrun.make_groups(args)
    model_parallel_cuda_manual_seed(args.seed)
    config = gpt_config_from_args(args)
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = builder.build_model(groups, pre_process=True, post_process=True).train()
    if not args.bf16:
        return model
    model = model.bfloat16()
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()  # as the training loop's wrapper does
    return model


def _watched(model: Any, args: Namespace) -> dict[str, int]:
    """Bytes by module that one forward pass and its loss save."""
    import torch

    owners = _owners(model)
    kept = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found: dict[int, tuple[str, Any]] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            found.setdefault(storage._cdata, (owners[-1], storage))
        return tensor

    b, s = args.micro_batch_size, args.seq_length
    torch.manual_seed(args.seed)
    tokens = torch.randint(0, args.vocab_size, (b, s))
    places = torch.arange(s).repeat(b, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mask = torch.ones(b, s)
        losses = model(tokens, places, None, labels=tokens, loss_mask=mask)
        (losses.float() * mask).sum()
    sizes = dict.fromkeys(activations.MODULES, 0)
    for owner, storage in found.values():
        sizes[owner] += storage.nbytes()
    return sizes


def _owners(model: Any) -> list[str]:
    """A stack whose end names the module that computes: filled by hooks as the model runs."""
    stack = ["output"]
    experts = {n for n, m in model.named_modules() if type(m).__name__ == "MoELayer"}

    def place(name: str) -> str:
        part = name.removeprefix("decoder.").removeprefix("layers.").lstrip("0123456789.")
        if not name or name.startswith("output_layer"):
            return "output"
        moe = any(name == at or name.startswith(f"{at}.") for at in experts)
        found = next(kind for start, kind in _PLACES if part.startswith(start))
        return "moe" if moe and found == "mlp" else found

    for name, module in model.named_modules():
        where = place(name)
        module.register_forward_pre_hook(lambda m, a, where=where: stack.append(where))
        module.register_forward_hook(lambda m, a, o: (stack.pop(), None)[1], always_call=True)
    return stack


def predicted(shape: Shape, job: Job) -> dict[str, float]:
    """Bytes by module that the planner expects of one microbatch of a job with one stage."""
    out = dict.fromkeys(activations.MODULES, 0.0)
    parts = [activations.first(shape, job), activations.last(shape, job)]
    parts += [activations.layer(shape, job, moe=False)] * shape.dense_mlps
    parts += [activations.layer(shape, job, moe=True)] * shape.moe
    parts += [{"mtp": activations.mtp(shape, job)}] * shape.mtp
    for part in parts:
        for name, value in part.items():
            out[name] += value * job.tokens
    return out
