"""How large gradient buckets are, from the cluster's link between nodes."""

from typing import Any

import torch.distributed as dist

from megatron.efa.cluster.current import current
from megatron.efa.comm import choose
from megatron.efa.data import settings


def prepare(ddp_config: Any, groups: Any, model: list[Any]) -> None:
    """Split the groups of DDP, and set `ddp_config.bucket_size` if no flag sets it.

    `groups` is a ProcessGroupCollection, `model` the chunks that DDP will wrap. All ranks call it,
    and so make the parts in one order. Leaves the size, in elements, to upstream where nodes are
    not crossed by a group of several ranks a node, or the cluster does not tell its far link.
    """
    if settings.mode() == "off":
        return
    dense = settings.split(_group(groups, "intra_dp_cp", "dp_cp"))
    for name in ("intra_expt_dp", "inter_dist_opt"):
        group = getattr(groups, name, None)
        if group is not None and group.size() > 1:
            settings.split(group)
    far, sized = current().far, ""
    given = ddp_config.bucket_size is not None or ddp_config.num_buckets is not None
    if dense.spans_nodes and far is not None and ddp_config.overlap_grad_reduce and not given:
        size = choose.bucket_bytes(dense, far)
        ddp_config.bucket_size = max(1, size // _width(ddp_config, model))
        sized = (
            f", in buckets of {ddp_config.bucket_size} elements ({size / 1e6:.1f} MB), which reach "
            f"{choose.SHARE:.0%} of {far.peak / 1e9:.3g} GB/s between nodes"
        )
    if dist.get_rank() == 0:
        lies = f"{dense.nodes} nodes of {dense.per_node} ranks" if dense.even else "uneven nodes"
        print(f"> data parallelism over {lies}{sized}", flush=True)


def _group(groups: Any, *names: str) -> Any:
    """The first of the groups that the collection has."""
    return next(getattr(groups, name) for name in names if hasattr(groups, name))


def _width(ddp_config: Any, model: list[Any]) -> int:
    """Bytes of a gradient's element in the buckets."""
    if ddp_config.grad_reduce_in_fp32:
        return 4
    parameters = (p for chunk in model for p in chunk.parameters() if p.requires_grad)
    return max((parameter.element_size() for parameter in parameters), default=4)
