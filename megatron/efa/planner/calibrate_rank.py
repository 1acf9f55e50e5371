"""What each rank of `megatron-efa calibrate` measures: collectives by tier and size, and GEMMs.

All ranks do the same at the same time, as they do in a step: links and cores are shared as they are
then. A time is the median over rounds of the slowest rank's.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.efa.cluster.current import current
from megatron.efa.cluster.model import Compute, Link, Points

ROUNDS = 5
GEMM_SECONDS = 0.2
"""Longest GEMM worth a point."""


@dataclass(frozen=True)
class Sweep:
    """Which sizes to measure."""

    sizes: tuple[int, ...]
    """Bytes that one rank sends in a call."""
    precisions: tuple[str, ...]
    memory_bytes: float | None = None
    """Of one rank, where it is not a GPU's own."""


def measure(sweep: Sweep) -> tuple[Link | None, Link | None, Compute]:
    """(near, far, compute) of this job's cluster; the same on every rank.

    torch.distributed must be up. near: ranks of one node, all nodes at once. far: one rank of every
    node, all such groups at once, so that a rank has its share of its node's network; all-to-alls
    among all ranks, as those of experts are, by the bytes that leave the node.
    """
    import torch.distributed as dist

    cluster, rank = current(), dist.get_rank()
    size = len(cluster.ranks_of(cluster.node_of(rank)))
    nodes = [list(cluster.ranks_of(i)) for i in range(len(cluster.nodes))]
    rails = [[ranks[i] for ranks in nodes] for i in range(size)]
    near = _tier(_mine(nodes, rank), sweep.sizes) if size > 1 else None
    far = _tier(_mine(rails, rank), sweep.sizes) if len(nodes) > 1 else None
    if far is not None and size > 1:
        share = (len(nodes) - 1) * size / (len(nodes) * size - 1)
        points = _points("alltoall", dist.group.WORLD, sweep.sizes, share)
        far = replace(far, curves=(("alltoall", points), *far.curves[1:]))
    return near, far, _compute(sweep, far or near)


def _mine(lists: Sequence[list[int]], rank: int) -> Any:
    import torch.distributed as dist

    groups = [dist.new_group(ranks) for ranks in lists]
    return next(group for ranks, group in zip(lists, groups, strict=True) if rank in ranks)


def _tier(group: Any, sizes: Sequence[int]) -> Link:
    """Curves of one tier, and the alpha-beta line through its exchanges' ends."""
    curves: list[tuple[str, Points]] = []
    for name in _CALLS:
        curves.append((name, _points(name, group, sizes)))
    (small, first), (large, last) = curves[0][1][0], curves[0][1][-1]
    peak = (large - small) / max(last - first, 1e-9) if large > small else large / last
    return Link(_round(peak), _round(max(first - small / peak, 1e-7)), tuple(curves))


def _points(name: str, group: Any, sizes: Sequence[int], share: float = 1.0) -> Points:
    """One curve; `share`: of what a rank sends, the part that counts."""
    points = {}
    for size in sizes:
        call, sent = _CALLS[name](group, round(size / share))
        points[float(round(sent * share))] = _round(_seconds(call))
        _tell(f"{name} of {sent} bytes: {list(points.values())[-1] * 1e3:.2f} ms")
    return tuple(sorted(points.items()))


def _alltoall(group: Any, size: int) -> tuple[Callable[[], None], int]:
    import torch
    import torch.distributed as dist

    world = dist.get_world_size(group)
    each = max(size // 4 // (world - 1), 1)
    sent = torch.ones(world * each, device=_device())
    got = torch.empty_like(sent)
    return lambda: dist.all_to_all_single(got, sent, group=group), each * 4 * (world - 1)


def _allgather(group: Any, size: int) -> tuple[Callable[[], None], int]:
    """A ring sends every part but one over each rank's link."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size(group)
    part = torch.ones(max(size // 4 // (world - 1), 1), device=_device())
    whole = torch.empty(world * part.numel(), device=_device())
    call = lambda: dist.all_gather_into_tensor(whole, part, group=group)  # noqa: E731
    return call, part.nbytes * (world - 1)


def _reducescatter(group: Any, size: int) -> tuple[Callable[[], None], int]:
    import torch
    import torch.distributed as dist

    world = dist.get_world_size(group)
    part = torch.empty(max(size // 4 // (world - 1), 1), device=_device())
    whole = torch.ones(world * part.numel(), device=_device())
    call = lambda: dist.reduce_scatter_tensor(part, whole, group=group)  # noqa: E731
    return call, part.nbytes * (world - 1)


def _sendrecv(group: Any, size: int) -> tuple[Callable[[], None], int]:
    """To the next rank of the group and from the one before."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    here = ranks.index(dist.get_rank())
    to, source = ranks[(here + 1) % len(ranks)], ranks[here - 1]
    sent = torch.ones(max(size // 4, 1), device=_device())
    got = torch.empty_like(sent)

    def call() -> None:
        ops = [dist.P2POp(dist.isend, sent, to, group), dist.P2POp(dist.irecv, got, source, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return call, sent.nbytes


_CALLS = {
    "alltoall": _alltoall,
    "allgather": _allgather,
    "reducescatter": _reducescatter,
    "sendrecv": _sendrecv,
}


def _seconds(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median over rounds of the slowest rank's time, after one round that does not count."""
    import torch
    import torch.distributed as dist

    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        call()
        _wait()
        times.append(time.perf_counter() - start)
    found = torch.tensor(times[1:], dtype=torch.float64, device=_device())
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return statistics.median(found.tolist())


def _compute(sweep: Sweep, link: Link | None) -> Compute:
    from megatron.efa.planner import calibrate_layers

    gemm = tuple((name, _gemms(name)) for name in sweep.precisions)
    host = calibrate_layers.measure(sweep.precisions[0], lambda call: _seconds(call, 9))
    least = 4 * link.curves[0][1][0][1] if link else 0.0  # the exchanges of tokens themselves
    dispatch = tuple((name, _round(max(value - least, 1e-6))) for name, value in host.dispatch)
    return Compute(
        _kind(), _memory(sweep), _round(_copy_rate()), gemm, _round(host.block),
        _round(host.moe_block), _round(host.expert), _round(host.step), dispatch,
    )  # fmt: skip


def _gemms(precision: str) -> Points:
    """GEMMs of n x n by n x n, doubled until one takes GEMM_SECONDS."""
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    points, n = [], 32
    while n <= 16384:
        a = torch.ones(n, n, dtype=kind, device=_device())
        repeats = max(1, round(1e7 / n**3))

        def call(a: Any = a, repeats: int = repeats) -> None:
            for _ in range(repeats):
                torch.matmul(a, a)

        seconds = _seconds(call) / repeats
        points.append((2.0 * n**3, _round(2 * n**3 / seconds)))
        _tell(f"{precision} GEMM of {n}: {points[-1][1]:.3g} FLOP/s")
        if seconds > GEMM_SECONDS / 8:  # the next takes eight times as long
            break
        n *= 2
    return tuple(points)


def _copy_rate(size: int = 1 << 24) -> float:
    import torch

    source = torch.ones(size // 4, device=_device())
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source))


def _kind() -> str:
    import torch

    from megatron.efa import cpu

    return "cpu" if cpu.enabled() else torch.cuda.get_device_name()


def _memory(sweep: Sweep) -> float:
    import torch

    if sweep.memory_bytes is not None:
        return sweep.memory_bytes
    from megatron.efa import cpu

    if not cpu.enabled():
        return float(torch.cuda.get_device_properties(_device()).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return float(total // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _device() -> Any:
    import torch

    from megatron.efa import cpu

    return (
        torch.device("cpu") if cpu.enabled() else torch.device("cuda", torch.cuda.current_device())
    )


def _wait() -> None:
    from megatron.efa import cpu

    if not cpu.enabled():
        import torch

        torch.cuda.synchronize()


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _tell(text: str) -> None:
    if os.environ.get("RANK") == "0":
        print(text, flush=True)
