"""Activations and their gradients between pipeline stages (docs/paths.md).

The patched `p2p_communication` hands its `P2PCommunicator` to `communicator`, and uses the subclass
that it gets.
"""

from megatron.efa.pipeline.communicator import communicator
from megatron.efa.pipeline.settings import configure

__all__ = ["communicator", "configure"]
