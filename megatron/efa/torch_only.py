"""What Megatron expects of Transformer Engine or Apex, in plain torch.

Called from patches, and only where neither is installed: on CPUs, and on GPUs without them.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adam import adam

from megatron.efa.errors import EfaError


def norm_under_sequence_parallelism(
    norm: type, config: Any, hidden_size: int, eps: float
) -> torch.nn.Module:
    """A torch norm for a model whose activations are split along the sequence.

    Its weights see only this rank's share of the sequence, so they are marked: upstream then sums
    their gradients over the tensor-parallel group. Without the mark the model would train wrongly
    and silently.

    Args:
        norm: upstream's class that builds a torch norm but refuses sequence parallelism.
        config: the model's TransformerConfig; it is not changed.
        hidden_size: size of the normalised, last dimension.
        eps: added to the variance.
    """
    whole = copy.copy(config)
    whole.sequence_parallel = False
    module = norm(config=whole, hidden_size=hidden_size, eps=eps)
    for parameter in module.parameters():
        parameter.sequence_parallel = True
    return module


class Adam(torch.optim.Optimizer):
    """torch's Adam and AdamW with the step in the parameter group, as Apex and Transformer Engine
    have it.

    Upstream's distributed-optimizer checkpoints are made for that. With torch's own classes, which
    keep a step tensor a parameter, a checkpoint does not load, or loads with one step tensor shared
    by all parameters, which then advances once a parameter.

    The update is torch's own function, so it equals torch.optim.AdamW (`adam_w_mode`) or
    torch.optim.Adam bit for bit. State of a parameter: `exp_avg` and `exp_avg_sq`, of its shape and
    dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise EfaError(
                "--optimizer-cuda-graph needs the Adam of Transformer Engine, which is not "
                "installed: remove the flag."
            )
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient; the step of each group advances by one."""
        for group in self.param_groups:
            if group["params"]:
                self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        states = [self._state_of(p) for p in params]
        beta1, beta2 = group["betas"]
        # torch advances these itself; one a parameter, since it does so in place.
        steps = torch.full((len(params),), float(group.get("step", 0)), device="cpu")
        group["step"] = group.get("step", 0) + 1
        adam(
            params,
            [p.grad for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            list(steps.unbind()),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=self.adam_w_mode,
        )

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
