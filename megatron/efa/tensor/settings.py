"""The switch `--efa-tensor`, and what is to be said of tensor parallelism between nodes."""

import logging
from argparse import Namespace

from megatron.efa import groups
from megatron.efa.cluster.current import current
from megatron.efa.comm import route
from megatron.efa.errors import EfaError
from megatron.efa.groups.shape import shape_of

_log = logging.getLogger(__name__)

PURPOSE = "tp"
AXES = ("tp", "tp_cp", "ep_tp")


def configure(args: Namespace) -> None:
    """Do from now on as Megatron's `args` say; before process groups are made.

    Raises EfaError where collectives that are to go over two levels are Transformer Engine's.
    """
    mode = getattr(args, "efa_tensor", "off")
    shape = shape_of(range(args.tensor_model_parallel_size), current().domain_of)
    spans = shape.nodes > 1
    if spans and args.rank == 0 and max(map(len, shape.blocks)) > 1:
        most = max(map(len, shape.blocks))
        _log.warning(
            f"tensor parallelism of {args.tensor_model_parallel_size} spans {shape.nodes} nodes, "
            "and every layer waits for it to cross the network: --tensor-model-parallel-size "
            f"{most} stays in a node; make up for it by pipeline stages or experts' parallelism"
        )
    theirs = getattr(args, "transformer_impl", "local") != "local"
    if spans and mode == "on" and theirs:
        raise EfaError(
            f"--efa-tensor on: the collectives of --transformer-impl {args.transformer_impl} are "
            "inside it and cannot go over two levels: give --transformer-impl local, or "
            "--efa-tensor auto, which leaves them where they are"
        )
    route.send(AXES, mode, PURPOSE)
    if mode != "off":
        if spans and args.rank == 0:
            print(
                f"> tensor parallelism over {shape.nodes} nodes of {len(shape.blocks[0])} ranks"
                f"{', by Transformer Engine itself' if theirs else ''}"
            )
        for axis in AXES:
            groups.expect(axis, PURPOSE)
