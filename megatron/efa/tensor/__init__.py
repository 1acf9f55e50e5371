"""Collectives of tensor parallelism where its groups span nodes (docs/paths.md).

The patched modules take their `torch` from `comm.route`; here stands the switch.
"""

from megatron.efa.tensor.settings import configure

__all__ = ["configure"]
