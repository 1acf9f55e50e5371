"""Process groups for CPUs: gloo instead of NCCL, and the collectives that gloo lacks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.efa.redirect import Redirection


class Followed:
    """An asynchronous collective with local work (copies, sums) to do once it has finished."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish

    def wait(self, timeout: Any = None) -> bool:
        """Block until the result is in place; the local work is done once."""
        if timeout is None:
            self._work.wait()
        else:
            self._work.wait(timeout)
        finish, self._finish = self._finish, lambda: None
        finish()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _without_nccl(backend: Any) -> Any:
    """gloo where NCCL is named ("nccl", "cpu:gloo,cuda:nccl"); fake and others stay as they are."""
    return "gloo" if backend is not None and "nccl" in str(backend).lower() else backend


def _integers(splits: Any) -> list[int] | None:
    """Split sizes as gloo wants them. Upstream gives tensors, or arrays, or lists."""
    return splits.tolist() if hasattr(splits, "tolist") else splits


def _exchange(
    parts: list[torch.Tensor], sizes: list[int], like: torch.Tensor, group: Any
) -> tuple[Any, list[torch.Tensor]]:
    """Start sending `parts[i]` to rank i of `group`; rank i sends us `sizes[i]` rows like `like`.

    Returns the work and the list of tensors that it fills. Exactly the rows that are asked for
    travel, where padding to the longest would send more.
    """
    received = like.new_empty((sum(sizes), *like.shape[1:]))
    sent = torch.cat([part.contiguous() for part in parts])
    work = dist.all_to_all_single(
        received, sent, sizes, [part.shape[0] for part in parts], group=group, async_op=True
    )
    return work, list(received.split(sizes))


def _conclude(work: Any, finish: Callable[[], None], async_op: bool) -> Followed | None:
    followed = Followed(work, finish)
    if async_op:
        return followed
    followed.wait()
    return None


def _all_gather(real: Callable[..., Any]) -> Callable[..., Any]:
    """gloo gathers tensors of one size only: gather unequal ones by an all-to-all."""

    @functools.wraps(real)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in tensor_list}) <= 1:
            return real(tensor_list, tensor, group=group, async_op=async_op)
        sizes = [part.shape[0] for part in tensor_list]
        work, received = _exchange([tensor] * len(sizes), sizes, tensor, group)

        def finish() -> None:
            for part, rows in zip(tensor_list, received, strict=True):
                part.copy_(rows)

        return _conclude(work, finish, async_op)

    return all_gather


def _reduce_scatter(real: Callable[..., Any]) -> Callable[..., Any]:
    """gloo scatters sums of one size only: exchange unequal ones and sum them in rank order."""

    @functools.wraps(real)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in input_list}) <= 1:
            return real(output, input_list, op=op, group=group, async_op=async_op)
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"reduce_scatter of unequal parts with {op} over gloo")
        ranks = len(input_list)
        work, received = _exchange(input_list, [output.shape[0]] * ranks, output, group)

        def finish() -> None:
            output.copy_(received[0])
            for rows in received[1:]:
                output.add_(rows)
            if op == dist.ReduceOp.AVG:
                output.div_(ranks)

        return _conclude(work, finish, async_op)

    return reduce_scatter


def _all_to_all_single(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return real(
            output,
            input,
            _integers(output_split_sizes),
            _integers(input_split_sizes),
            group=group,
            async_op=async_op,
        )

    return all_to_all_single


def _init_process_group(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        real("gloo" if backend is None else _without_nccl(backend), *args, **kwargs)

    return init_process_group


def _new_group(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # The options that reach here are NCCL's.
        kwargs.pop("device_id", None)
        return real(ranks, timeout, _without_nccl(backend), None, *args, **kwargs)

    return new_group


def _barrier(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def barrier(group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return real(group, async_op, **kwargs)

    return barrier


_WRAPPERS = {
    "init_process_group": _init_process_group,
    "new_group": _new_group,
    "barrier": _barrier,
    "all_to_all_single": _all_to_all_single,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def redirect(on: Redirection) -> None:
    """Rebind the functions of torch.distributed, where callers and torch itself look them up."""
    for name, wrap in _WRAPPERS.items():
        wrapped = wrap(getattr(distributed_c10d, name))
        on.set(distributed_c10d, name, wrapped)
        on.set(dist, name, wrapped)
