"""What stands in for torch.cuda on a CPU: device, streams, events, memory."""

import contextlib
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Event:
    """A point in time on the host. Everything before it has run: a CPU runs in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`.

        Raises:
            RuntimeError: one of them was never recorded (as with CUDA).
        """
        if self._recorded is None or end._recorded is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end._recorded - self._recorded) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def wait(self, stream: Any = None) -> None:
        return None


class Stream:
    """A name for a queue of work that is always empty."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device, self.priority = device, priority
        self._previous: list[Stream] = []

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def wait_event(self, event: Event) -> None:
        return None

    def wait_stream(self, stream: "Stream") -> None:
        return None

    def __enter__(self) -> "Stream":
        self._previous.append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        set_stream(self._previous.pop())


_DEFAULT_STREAM = Stream()
_thread = threading.local()
_device = 0


def current_stream(device: Any = None) -> Stream:
    return getattr(_thread, "stream", _DEFAULT_STREAM)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _thread.stream = stream


class stream:
    """Make `stream` the current one in the block; None changes nothing.

    As torch's, one object serves several blocks: gradient reduction enters its own for each bucket.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._previous: list[Stream] = []

    def __enter__(self) -> None:
        self._previous.append(current_stream())
        set_stream(self.stream)

    def __exit__(self, *exc: object) -> None:
        set_stream(self._previous.pop())


def current_device() -> int:
    return _device


def set_device(device: Any) -> None:
    global _device
    index = getattr(device, "index", device)
    _device = index if isinstance(index, int) else 0


def device_count() -> int:
    """The ranks of this node, each of which takes the CPU for its own device."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _status(key: str) -> int:
    """Bytes of a memory entry of /proc/self/status (Linux)."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    return 0


def memory_in_use(device: Any = None) -> int:
    """Resident bytes of this process, Python and libraries included."""
    return _status("VmRSS:")


def peak_memory(device: Any = None) -> int:
    """Largest number of resident bytes since the start or the last reset."""
    return _status("VmHWM:")


def reset_peak(device: Any = None) -> None:
    # Linux, proc(5): writing 5 sets the peak to what is resident now. A sandbox may forbid it; then
    # the peak is that of the whole run.
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def memory_stats(device: Any = None) -> dict[str, int]:
    """The keys of torch.cuda.memory_stats that have a meaning for a process; the others read 0."""
    stats: dict[str, int] = defaultdict(int)
    for kind in ("allocated", "reserved", "active"):
        stats[f"{kind}_bytes.all.current"] = memory_in_use()
        stats[f"{kind}_bytes.all.peak"] = peak_memory()
    return stats


def total_memory() -> int:
    """Physical bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total physical bytes of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), total_memory()


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """A device without compute capability, so that nothing takes it for a GPU with some kernel."""
    return SimpleNamespace(
        name="CPU",
        major=0,
        minor=0,
        total_memory=total_memory(),
        multi_processor_count=os.cpu_count() or 1,
        warp_size=1,
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own: Dynamo refuses to be imported if two names that it treats
    differently are one object."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return stand_in


def names() -> dict[str, Any]:
    """Attribute of torch.cuda -> what stands in for it."""
    stand_ins = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "current_device": current_device,
        "set_device": set_device,
        "device_count": device_count,
        "synchronize": _nothing,
        "get_device_name": lambda device=None: "CPU",
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_properties": get_device_properties,
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _DEFAULT_STREAM,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "memory_allocated": memory_in_use,
        "memory_reserved": memory_in_use,
        "max_memory_allocated": peak_memory,
        "max_memory_reserved": peak_memory,
        "device_memory_used": memory_in_use,
        "reset_peak_memory_stats": reset_peak,
        "memory_stats": memory_stats,
        "mem_get_info": mem_get_info,
        "memory_summary": lambda device=None, abbreviated=False: (
            f"resident {memory_in_use()} bytes, peak {peak_memory()} bytes"
        ),
    }
    return {
        name: value if isinstance(value, type) else _own(value) for name, value in stand_ins.items()
    }
