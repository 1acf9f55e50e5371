"""Upstream's P2P communicator with our wires below its methods.

Its methods, which the schedules call, differ in what they send and receive at once; all of them end
in `_communicate`, and that is what is replaced.
"""

from typing import Any

import torch

from megatron.efa.errors import EfaError
from megatron.efa.pipeline import settings
from megatron.efa.pipeline.wires import Wires, wires_of


def communicator(upstream: type) -> type:
    """Return the subclass of upstream's `P2PCommunicator` that takes its place."""

    class P2PCommunicator(upstream):
        """Sends over wires of our own with `--efa-pipeline on`; else it is upstream's."""

        def __init__(self, pp_group: Any, config: Any) -> None:
            super().__init__(pp_group, config)
            self.wires: Wires | None = wires_of(pp_group, config) if settings.on() else None

        def _communicate(self, **message: Any) -> tuple[Any, Any, Any]:
            if self.wires is None:
                return super()._communicate(**message)
            return _communicate(self, self.wires, **message)

    return P2PCommunicator


def _communicate(
    communicator: Any,
    wires: Wires,
    *,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Any,
    wait_on_reqs: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Any] | None]:
    """Start what is asked for; returns what comes from the previous and the next stage.

    And the handles by name, as upstream without `batch_p2p_comm`; None if they were waited for.
    Everything starts before anything is waited for, so that no two stages wait for each other.
    """
    prev_shape = next_shape = tensor_shape
    if communicator.config.variable_seq_lengths or communicator.config.mtp_standalone:
        prev_shape, next_shape = communicator._communicate_shapes(
            tensor_send_next, tensor_send_prev, recv_prev, recv_next
        )
    received = {
        "recv_prev": _empty(prev_shape, communicator.config) if recv_prev else None,
        "recv_next": _empty(next_shape, communicator.config) if recv_next else None,
    }
    sent = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
    handles = {n: wires.of(n).receive(t) for n, t in received.items() if t is not None}
    handles |= {n: wires.of(n).send(t) for n, t in sent.items() if t is not None}
    if wait_on_reqs:
        for handle in handles.values():
            handle.wait()
    return received["recv_prev"], received["recv_next"], None if wait_on_reqs else handles


def _empty(shape: Any, config: Any) -> torch.Tensor:
    if config.pipeline_dtype is None or shape is None:
        raise EfaError(
            "the pipeline is to receive a tensor of no known shape or dtype: set pipeline_dtype in "
            "the model's config, and the shape unless variable_seq_lengths is set"
        )
    device = torch.cuda.current_device()
    return torch.empty(shape, requires_grad=True, device=device, dtype=config.pipeline_dtype)
