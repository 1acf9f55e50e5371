"""The switch `--efa-data-parallel`, and the two-level groups of data parallelism."""

from argparse import Namespace
from typing import Any

from megatron.efa import groups
from megatron.efa.comm import Mode, route
from megatron.efa.groups import TwoLevel

PURPOSE = "dp"

_mode: Mode = "off"


def configure(args: Namespace) -> None:
    """Do from now on as Megatron's `args` say; before process groups are made."""
    global _mode
    _mode = getattr(args, "efa_data_parallel", "off")
    # What finalizing gradients reduces over these groups: routers' biases and quantiles.
    route.send(("dp_cp", "tp_dp_cp"), _mode, PURPOSE)
    if _mode != "off":
        several = args.num_distributed_optimizer_instances > 1
        for axis in ("intra_dp_cp", "intra_ep_dp") if several else ("dp_cp", "ep_dp"):
            groups.expect(axis, PURPOSE)


def mode() -> Mode:
    return _mode


def split(group: Any) -> TwoLevel:
    """`group` and its parts for data parallelism."""
    return groups.two_level(group, PURPOSE)
