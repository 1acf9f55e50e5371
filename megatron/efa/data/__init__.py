"""Gradients and parameters of data parallelism over two-level groups (docs/data-parallel.md).

The patched DDP calls `prepare` before it makes its buckets, and `reduce_gradients` and
`gather_parameters` where it would call its own collectives.
"""

from megatron.efa.data.buckets import prepare
from megatron.efa.data.settings import configure
from megatron.efa.data.sync import gather_parameters, reduce_gradients

__all__ = ["configure", "gather_parameters", "prepare", "reduce_gradients"]
