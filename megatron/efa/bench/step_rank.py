"""What each rank of `bench step` does: `pretrain_gpt.py` itself, with a clock around its steps."""

import importlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.efa.emulate import network
from megatron.efa.errors import EfaError

_ROOT = Path(__file__).resolve().parents[3]
_IMPORTED_LATE = ("torch._dynamo", "megatron.core.tokenizers.text", "megatron.efa.arguments",
                  "megatron.efa.gpt", "pretrain_gpt")  # fmt: skip
"""What each rank would otherwise import on its own, up to its first step."""


@dataclass
class Steps:
    """What one rank saw; `ends`, `sent` and `losses` have an entry a training step."""

    began: float = 0.0
    """When its rank began, everything imported; on the machine's one clock, seconds."""
    ends: list[float] = field(default_factory=list)
    """On the same clock."""
    sent: list[int] = field(default_factory=list)
    """Bytes that have left the node by then, on its first rank; empty without links."""
    losses: list[dict[str, float]] = field(default_factory=list)
    """By name; empty dicts but on the last pipeline stage."""
    chosen: dict[int, Any] = field(default_factory=dict)
    """By layer number: experts of each token in the last step, int16 [T, k], if recorded."""
    experts: int = 0


def preload(gpu: bool) -> None:
    """Import what ranks need before they are forked. Nothing here may touch a GPU."""
    from megatron.efa import cpu
    from megatron.efa.fork import verify_at_start

    os.environ.setdefault("NO_VCS_VERSION", "1")  # as megatron.efa.entry sets it
    verify_at_start()
    if not gpu:
        cpu.enable()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks it of layers in parts
    if not (_ROOT / "pretrain_gpt.py").is_file():
        raise EfaError(f"there is no pretrain_gpt.py in {_ROOT}: run it from a checkout")
    sys.path.insert(0, str(_ROOT))
    for module in _IMPORTED_LATE:
        importlib.import_module(module)


def train(flags: Sequence[str], links: bool, record_routing: bool) -> Steps:
    """Train on this rank with Megatron's `flags`, to the end. Raises EfaError if it does not."""
    import pretrain_gpt
    from megatron.efa import entry

    steps = Steps(began=time.monotonic())
    first = int(os.environ["RANK"]) % int(os.environ["LOCAL_WORLD_SIZE"]) == 0
    _watch_steps(steps, links and first)
    if record_routing:
        _watch_routers(steps)
    sys.argv = ["pretrain_gpt.py", *flags]
    code = entry.run(pretrain_gpt.configure, pretrain_gpt.train, sys.argv[1:])
    if code:
        raise EfaError(f"pretrain_gpt.py ended with code {code}")
    return steps


def _watch_steps(steps: Steps, counts: bool) -> None:
    from megatron.training import training

    train_step = training.train_step

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        steps.losses.append({name: float(value) for name, value in result[0].items()})
        steps.ends.append(time.monotonic())
        if counts:
            steps.sent.append(network.counters(os.getpid()).sent_bytes)
        return result

    training.train_step = watched


def _watch_routers(steps: Steps) -> None:
    """Keep the last choice of each layer's router, where every token has as many experts."""
    import torch

    from megatron.core.transformer.moe.router import TopKRouter

    forward = TopKRouter.forward

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = forward(self, *args, **kwargs)
        steps.experts = chosen.shape[1]
        if bool((chosen.sum(dim=1) == self.topk).all()):
            experts = chosen.nonzero()[:, 1].view(-1, self.topk)
            steps.chosen[self.layer_number] = experts.to("cpu", torch.int16)
        return probs, chosen

    TopKRouter.forward = watched
