"""Megatron on CPUs over gloo: torch.cuda redirected to the CPU, every process group to gloo.

Only torch is rebound, never Megatron, so an unpatched megatron-core runs under it as well. Factory
functions are rebound rather than intercepted by a TorchFunctionMode: a mode costs on every
operation, is per thread, and is off inside `torch.autograd.backward`, hence inside a recomputed
checkpoint.

Streams do nothing, since a CPU runs in program order; events keep real times, memory figures are
the process's own, and asynchronous collectives stay asynchronous.
"""

import functools
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from megatron.efa.errors import EfaError
from megatron.efa.redirect import Redirection

_on = Redirection()
_warning_filters: list[tuple[logging.Logger, logging.Filter]] = []


def wanted(argv: Sequence[str]) -> bool:
    """Whether Megatron, started with the flags `argv`, should run on CPUs here.

    True if MEGATRON_EFA_CPU=1, or if `--distributed-backend gloo` is asked for on a machine without
    a GPU. Imports torch only in the second case.

    Raises:
        EfaError: it should, and the flags ask for what CPUs cannot do.
    """
    if os.environ.get("MEGATRON_EFA_CPU") == "1" or enabled():
        on_cpus = True
    elif _value(argv, "--distributed-backend") == "gloo":
        import torch

        on_cpus = not torch.cuda.is_available()
    else:
        on_cpus = False
    if on_cpus:
        check(argv)
    return on_cpus


_ONLY_ON_GPUS = {
    "--moe-grouped-gemm": "needs kernels of Transformer Engine",
    "--use-megatron-fsdp": "shards with NCCL and CUDA streams",
    "--use-torch-fsdp2": "shards with NCCL and CUDA streams",
    "--log-straggler": "reads clocks and temperatures of GPUs",
    "--record-memory-history": "records the allocator of a GPU",
}


def check(argv: Sequence[str]) -> None:
    """Raise EfaError if Megatron's flags `argv` ask for what CPUs cannot do."""
    if _value(argv, "--context-parallel-size") not in (None, "1"):
        raise EfaError(
            "--context-parallel-size above 1 needs the attention of Transformer Engine, which "
            "runs on GPUs only: set it to 1 to run on CPUs."
        )
    for flag, why in _ONLY_ON_GPUS.items():
        if flag in argv:
            raise EfaError(f"{flag} {why}: leave it out to run on CPUs.")


def _value(argv: Sequence[str], flag: str) -> str | None:
    """What `argv` gives to `flag`, as two words or with an equals sign; the last one counts."""
    value = None
    for word, following in itertools.zip_longest(argv, argv[1:]):
        name, equals, given = word.partition("=")
        if name == flag:
            value = given if equals else following
    return value


def enabled() -> bool:
    """Whether the redirection is on in this process."""
    return bool(_on.names())


def redirected() -> list[str]:
    """Dotted names of everything that is rebound now; empty when off."""
    return _on.names()


def enable() -> None:
    """Redirect torch to the CPU and gloo. Idempotent; call it before anything imports megatron.

    Raises:
        EfaError: a name to be redirected does not exist in this PyTorch.
    """
    if enabled():
        return
    from megatron.efa import gloo

    try:
        _tensors(_on)
        _cuda(_on)
        _random(_on)
        _data_loader(_on)
        _compiler(_on)
        gloo.redirect(_on)
        # Upstream insists on it under tensor parallelism: it makes a GPU start kernels in the order
        # in which they were launched, which a CPU does anyway.
        _on.set_environment("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    except BaseException:
        _on.undo()
        raise
    _quiet_shared_generator()


def disable() -> None:
    """Put torch back as it was. For tests: modules imported meanwhile keep what they bound."""
    _on.undo()
    while _warning_filters:
        logger, rule = _warning_filters.pop()
        logger.removeFilter(rule)


def _to_cpu(device: Any) -> Any:
    """The CPU for what names a CUDA device (string, index, torch.device), else `device`."""
    import torch

    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


# fmt: off
_FACTORIES = (
    "arange", "asarray", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_TYPED = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
# fmt: on


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its `device` moved to the CPU and without pinned memory."""

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if kwargs.get("device") is not None:
                kwargs["device"] = _to_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return redirected


def _tensors(on: Redirection) -> None:
    """Factory functions, moves between devices, and the spelling of tensor types."""
    import torch
    from torch.utils._device import _device_constructors

    # `with torch.device("meta")` knows the factories by identity: let it learn the real ones, which
    # ours go on calling.
    _device_constructors()
    for name in _FACTORIES:
        on.wrap(torch, name, _on_cpu)
    for name in _NEW:
        on.wrap(torch.Tensor, name, _on_cpu)
    for name in _TYPED:
        on.set(torch.cuda, name + "Tensor", getattr(torch, name + "Tensor"))

    real_to, real_type, real_load = torch.Tensor.to, torch.Tensor.type, torch.load

    @functools.wraps(real_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (_to_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        return real_to(self, *args, **kwargs)

    @functools.wraps(real_type)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Upstream tells precisions apart by "torch.cuda.FloatTensor" and the like.
        if dtype is None:
            name = real_type(self)
            # Under a function mode, torch looks `type` up again and comes here twice.
            done = self.is_meta or name.startswith("torch.cuda.")
            return name if done else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return real_type(self, dtype, *args, **kwargs)

    @functools.wraps(real_load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real_load(f, _to_cpu(map_location), *args, **kwargs)

    on.set(torch, "load", load)
    on.set(torch.Tensor, "to", to)
    on.set(torch.Tensor, "type", type_)
    on.set(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    on.set(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)
    on.set(torch.Tensor, "record_stream", lambda self, stream: None)


def _cuda(on: Redirection) -> None:
    """torch.cuda itself: devices, streams, events, memory."""
    import torch

    from megatron.efa import cpu_device

    for name, value in cpu_device.names().items():
        on.set(torch.cuda, name, value)
    for name in ("range_push", "range_pop"):
        on.set(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)


class _Generators(Sequence):
    """`torch.cuda.default_generators` for a machine whose every device is the CPU."""

    def __getitem__(self, index: Any) -> Any:
        import torch

        return torch.default_generator

    def __len__(self) -> int:
        import torch

        return torch.cuda.device_count()


def _random(on: Redirection) -> None:
    """The CUDA generator is the CPU's: it is the one that operations on the CPU draw from."""
    import torch

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.default_generator.set_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def initial_seed() -> int:
        return torch.default_generator.initial_seed()

    for module in (torch.cuda, torch.cuda.random):
        on.set(module, "get_rng_state", get_rng_state)
        on.set(module, "set_rng_state", set_rng_state)
        on.set(module, "manual_seed", manual_seed)
        on.set(module, "manual_seed_all", manual_seed_all)
        on.set(module, "initial_seed", initial_seed)
    # A build of torch without CUDA has no such name; one with it fills the name lazily.
    on.set(torch.cuda, "default_generators", _Generators(), new=True)


def _data_loader(on: Redirection) -> None:
    """Data loaders neither pin memory nor draw from the generator that dropout draws from.

    A new iterator draws the seed of its workers from the CPU's generator. On a GPU that is not the
    model's generator; here it would be, and a resumed run, which builds its iterators after the
    generator was restored, would drop other elements than an unbroken one.
    """
    import torch
    from torch.utils.data import dataloader

    seeds = torch.Generator()
    real_init = dataloader._BaseDataLoaderIter.__init__

    @functools.wraps(real_init)
    def init(self: Any, loader: Any) -> None:
        loader.pin_memory = False
        if loader.generator is None:
            loader.generator = seeds
        real_init(self, loader)

    on.set(dataloader._BaseDataLoaderIter, "__init__", init)
    # It asks torch.cuda.is_available, and then a driver that is not there.
    on.set(torch.accelerator, "is_available", lambda: False)


def _compiler(on: Redirection) -> None:
    """Nothing is compiled at run time: neither by Dynamo, whose import alone costs seconds a rank,
    nor by a C++ compiler, which a machine may not have."""
    import torch
    from torch.utils import cpp_extension

    def leave(model: Any = None, **kwargs: Any) -> Any:
        return (lambda function: function) if model is None else model

    real_load = cpp_extension.load_inline

    @functools.wraps(real_load)
    def load_inline(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "share_storage_ext":
            return SimpleNamespace(share_storage=_refill_storage)
        return real_load(name, *args, **kwargs)

    on.set(torch, "compile", leave)
    on.set(cpp_extension, "load_inline", load_inline)


def _refill_storage(target: Any, source: Any) -> None:
    """Give `target` (a tensor whose storage was emptied) the contents of `source`'s storage.

    For upstream's recomputation without kept outputs, whose extension makes the two share memory.
    Below autograd as well: no version is counted up, and views of `target` see the data.
    """
    storage = source.untyped_storage()
    target.untyped_storage().resize_(storage.nbytes())
    target.untyped_storage().copy_(storage)


def _quiet_shared_generator() -> None:
    """Drop upstream's warning that the CPU generator moved while the CUDA one was in use: they are
    one here, so it would come with every initialised weight."""

    def unless_shared(record: logging.LogRecord) -> bool:
        return record.getMessage() != "CPU RNG state changed within GPU RNG context"

    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(unless_shared)
    _warning_filters.append((logger, unless_shared))
