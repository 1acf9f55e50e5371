"""One rank of `megatron-efa bench startup`: makes the groups in turns, upstream's way and ours."""

import argparse
import json
import re
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.efa import cpu

UPSTREAM = "upstream"
OURS = "by members alone"
PARTS = "by members alone, with parts of EP, DP"
WAYS = (UPSTREAM, OURS, PARTS)

LARGE = {
    "pipeline_model_parallel_size": 8,
    "expert_model_parallel_size": 64,
    "expert_tensor_parallel_size": 1,
}
"""Layout of the views: experts over eight nodes of eight, stages as far apart as they get."""


def main() -> None:
    """Run as --view or, under torchrun, as one rank of a job; rank 0 writes --out."""
    parser = argparse.ArgumentParser()
    for name in ("tp", "pp", "ep", "rounds", "view"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cpu.enable()
    if args.view:
        args.out.write_text(json.dumps(viewed(args.view, args.rounds)))
        return
    sizes = {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": args.pp,
        "expert_model_parallel_size": args.ep,
        "expert_tensor_parallel_size": 1,
    }
    dist.init_process_group("gloo")
    records = in_turns(sizes, args.rounds, dist.barrier)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(records))
    dist.destroy_process_group()


def in_turns(sizes: dict[str, int], rounds: int, meet: Callable[[], None]) -> list[dict[str, Any]]:
    """Median seconds of each way, from one `meet` to the next, over `rounds` turns."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    counts, peaks = {}, dict.fromkeys(WAYS, 0.0)
    for turn in range(rounds + 1):
        for way in WAYS:
            before = _peak_mib(reset=True)
            meet()
            start = time.perf_counter()
            counts[way] = _make(way, sizes)
            meet()
            if turn:  # the first warms caches and sockets
                seconds[way].append(time.perf_counter() - start)
                peaks[way] = max(peaks[way], _peak_mib() - before)
            _forget()
    return [
        {
            "way": way,
            "groups": counts[way],
            "seconds": statistics.median(took),
            "range": (min(took), max(took)),
            "mib": peaks[way],
        }
        for way, took in seconds.items()
    ]


def viewed(world: int, rounds: int) -> list[dict[str, Any]]:
    """The same for rank 0 of `world` fake ranks on nodes of eight."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron.efa.cluster.current import of_torchrun, use

    use(of_torchrun(world, 8))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    # Twins over gloo would look for the other ranks.
    return in_turns({**LARGE, "create_gloo_process_groups": False}, rounds, lambda: None)


def _make(way: str, sizes: dict[str, int]) -> int:
    """Make Megatron's groups; returns how many this rank is in."""
    from megatron.core import parallel_state
    from megatron.efa import groups
    from megatron.efa.groups import start

    start.unexpect()
    if way == PARTS:
        for axis, purpose in (("ep", "dispatch"), ("dp_cp", "grads"), ("ep_dp", "grads")):
            groups.expect(axis, purpose)
    groups.configure(Namespace(efa_groups=way != UPSTREAM))
    before = len(dist.distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(**sizes)
    return len(dist.distributed_c10d._world.pg_map) - before


def _forget() -> None:
    """Leave as many groups as before: the next way must not find them."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map)[1:]:
        dist.destroy_process_group(group)


def _peak_mib(reset: bool = False) -> float:
    """Most memory that this process has held, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


if __name__ == "__main__":
    main()
