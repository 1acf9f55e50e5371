"""The expert path: tokens cross the network once per node that hosts one of their experts."""

from megatron.efa.expert.settings import check, configure

__all__ = ["check", "configure"]
