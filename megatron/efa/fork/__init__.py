"""The fork: a pinned release of upstream plus insert-only patches, laid out under megatron/."""

from megatron.efa.fork.verify import verify_at_start

__all__ = ["verify_at_start"]
