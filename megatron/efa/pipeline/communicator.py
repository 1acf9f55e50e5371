"""Upstream's P2P communicator with our wires below its methods.

Its methods, which the schedules call, differ in what they send and receive at once; all of them end
in `_communicate`, and that is what is replaced.
"""

from typing import Any

import torch

from megatron.efa.errors import EfaError
from megatron.efa.pipeline import settings
from megatron.efa.pipeline.wires import Wires, wires_of

ORDER = (
    ("send_next", "recv_prev", "send_prev", "recv_next"),
    ("recv_prev", "send_next", "recv_next", "send_prev"),
)
"""What stages of even and of odd number begin first.

Where CUDA has one queue (CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron asks for) a transfer holds
up those begun after it: what a stage begins first its neighbour must begin first as well, or each
waits behind its own."""


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
    tensors = {
        "recv_prev": _empty(prev_shape, communicator.config) if recv_prev else None,
        "recv_next": _empty(next_shape, communicator.config) if recv_next else None,
        "send_next": tensor_send_next,
        "send_prev": tensor_send_prev,
    }
    handles = {}
    for name in ORDER[communicator.current_stage % 2]:
        if tensors[name] is not None:
            wire = wires.of(name)
            start = wire.send if name.startswith("send") else wire.receive
            handles[name] = start(tensors[name])
    if wait_on_reqs:
        for handle in handles.values():
            handle.wait()
    return tensors["recv_prev"], tensors["recv_next"], None if wait_on_reqs else handles


def _empty(shape: Any, config: Any) -> torch.Tensor:
    if config.pipeline_dtype is None or shape is None:
        raise EfaError(
            "the pipeline is to receive a tensor of no known shape or dtype: set pipeline_dtype in "
            "the model's config, and the shape unless variable_seq_lengths is set"
        )
    device = torch.cuda.current_device()
    return torch.empty(shape, requires_grad=True, device=device, dtype=config.pipeline_dtype)
