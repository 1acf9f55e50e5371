"""Collectives on two-level groups: see `collectives`, and docs/collectives.md."""

from megatron.efa.comm.choose import Mode
from megatron.efa.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from megatron.efa.comm.drive import Handle

__all__ = [
    "Handle",
    "Mode",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
]
