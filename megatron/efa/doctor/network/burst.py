"""Bursts: how fast two ranks send to each other, and how fast one rank multiplies matrices.

Each pair has a process group of its own (gloo on CPUs, NCCL on GPUs), so that one that fails takes
nothing else with it. Whoever receives measures; the two directions run one after the other.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

MEGABYTES = {"gloo": 8, "nccl": 512}
"""Of a burst: long enough for a rate, short enough for a slow link to end in time."""
_PINGS = 10
_REPEATS = 3
"""Bursts each way, of which the best counts: what else the nodes do only ever makes one slower."""
_GEMM = {"cpu": 384, "cuda": 8192}
_GEMM_S = 0.3


def backend() -> str:
    """nccl where PyTorch sees a GPU, gloo where not; empty without PyTorch."""
    try:
        import torch
    except ImportError:
        return ""
    return "nccl" if torch.cuda.is_available() else "gloo"


def open_store(address: str, port: int, head: bool) -> Any:
    """The store over which pairs find each other; on the head it listens (port 0: any)."""
    from torch.distributed import TCPStore

    return TCPStore(
        address, port, is_master=head, timeout=timedelta(seconds=20), wait_for_workers=False
    )


@contextlib.contextmanager
def group(store: Any, name: str, me: int, address: str, seconds: float) -> Iterator[Any]:
    """A process group of two, this one being `me` (0 or 1). Raises RuntimeError in time."""
    import torch.distributed as dist

    own = dist.PrefixStore(name, store)
    if backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        pair = dist.ProcessGroupNCCL(own, me, 2, options)
        try:
            yield pair
        finally:
            pair.abort()  # waits for nobody
        return
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    yield dist.ProcessGroupGloo(own, me, 2, options)


def measure(pair: Any, me: int, size: int, device: Any, seconds: float) -> dict[str, float]:
    """{rate: bytes/s that this rank received, milliseconds: half a round trip}; RuntimeError."""
    import torch

    small = torch.zeros(8, dtype=torch.uint8, device=device)
    large = torch.zeros(size, dtype=torch.uint8, device=device)
    limit = timedelta(seconds=seconds)

    def move(tensor: Any, sends: bool) -> None:
        work = pair.send([tensor], 1 - me, 0) if sends else pair.recv([tensor], 1 - me, 0)
        work.wait(limit)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(_PINGS + 1):
        start = time.perf_counter()
        for sender in (0, 1):
            move(small, me == sender)
        times.append(time.perf_counter() - start)
    rate = 0.0
    for sender in (0, 1) * _REPEATS:
        move(small, me == sender)  # so that both begin together
        start = time.perf_counter()
        move(large, me == sender)
        if me != sender:
            rate = max(rate, size / (time.perf_counter() - start))
    return {"rate": rate, "milliseconds": statistics.median(times[1:]) * 1e3 / 2}


def multiply(device: Any) -> float:
    """Operations a second of this rank's matrix products: bf16 on a GPU, fp32 on a CPU."""
    import torch

    size = _GEMM[device.type]
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.ones(size, size, dtype=kind, device=device) for _ in range(2))

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    run(2)
    times = max(1, round(_GEMM_S / max(run(2) / 2, 1e-6)))
    return 2 * size**3 * times / run(times)
