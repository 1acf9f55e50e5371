"""What `_ParamAndGradBucketGroup` calls in the place of its collectives.

`group` is that object of upstream's: buckets whose gradients (`grad_data`) and parameters
(`param_data`) are contiguous, and which are reduced and gathered together. Each function returns
False, with nothing done, where upstream's own code is to run: with the switch off, in a group that
has no two levels, and where `auto` finds the flat group faster for every bucket.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron.efa import comm
from megatron.efa.comm import choose
from megatron.efa.data import settings
from megatron.efa.groups import TwoLevel


class Pending:
    """Collectives of several buckets."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    @property
    def exposed(self) -> float:
        """Seconds that `wait` blocked the host, of those on two levels."""
        return sum(getattr(handle, "exposed", 0.0) for handle in self._handles)


def reduce_gradients(
    group: Any,
    process_group: Any,
    op: Any,
    async_op: bool,
    stream_context: AbstractContextManager,
    force_all_reduce: bool,
) -> bool:
    """Reduce the gradients of `group` over `process_group`; then over the optimizer's instances.

    Sets `group.grad_reduce_handle`. With several instances `async_op` is False and
    `stream_context` enters the stream on which both are to run, as upstream overlaps there.
    """
    config = group.ddp_config
    scatters = config.use_distributed_optimizer and not force_all_reduce
    kind = "reduce_scatter" if scatters else "all_reduce"
    two = _worthwhile(process_group, [bucket.grad_data for bucket in group.buckets], kind)
    if two is None:
        return False
    fp32 = scatters and config.reduce_scatter_with_fp32_accumulation
    mode, handles = settings.mode(), []
    with stream_context:
        for bucket in group.buckets:
            if scatters:
                shard = _shard(bucket.grad_data, two)
                handle = comm.reduce_scatter(shard, bucket.grad_data, two, op, async_op, fp32, mode)
            else:
                handle = comm.all_reduce(bucket.grad_data, two, op, async_op, mode=mode)
            handles.append(handle)
        if config.use_distributed_optimizer and config.num_distributed_optimizer_instances > 1:
            across = settings.split(group.inter_distributed_optimizer_instance_group)
            for bucket in group.buckets:
                comm.all_reduce(_shard(bucket.grad_data, two), across, op, mode=mode)
    group.grad_reduce_handle = Pending(handles) if async_op else None
    return True


def gather_parameters(group: Any, async_op: bool, force_sync: bool) -> bool:
    """Gather the parameters of `group` from the ranks of its optimizer's instance.

    Sets `group.param_gather_handle`, and does what upstream does after its own gathers.
    """
    process_group = group.intra_distributed_optimizer_instance_group
    two = _worthwhile(process_group, [bucket.param_data for bucket in group.buckets], "all_gather")
    if two is None:
        return False
    handles = [
        comm.all_gather(
            bucket.param_data, _shard(bucket.param_data, two), two, async_op, settings.mode()
        )
        for bucket in group.buckets
    ]
    group.param_gather_handle = Pending(handles) if async_op else None
    if force_sync and group.ddp_config.overlap_param_gather:
        group._post_param_sync()
    group.param_gather_dispatched = True
    return True


def _worthwhile(
    process_group: Any, tensors: Sequence[torch.Tensor], kind: choose.Kind
) -> TwoLevel | None:
    """The parts of `process_group`, if a collective of one of `tensors` would use them."""
    mode = settings.mode()
    if mode == "off":
        return None
    two = settings.split(process_group)
    plans = (choose.plan(two, t.nbytes, kind, mode, t.is_cuda) for t in tensors)
    return two if any(plan.two_level for plan in plans) else None


def _shard(whole: torch.Tensor, two: TwoLevel) -> torch.Tensor:
    """This rank's part of a bucket, a view."""
    return whole.view(two.flat.size(), -1)[two.flat.rank()]
