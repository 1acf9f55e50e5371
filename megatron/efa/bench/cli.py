"""`megatron-efa bench WHAT`: one line a benchmark, each in a module of its own.

Its module offers `add_arguments(parser)` and `run(args) -> int`, and is imported only when called.
"""

import argparse
import importlib
import importlib.util
import os
from typing import Any

from megatron.efa.errors import EfaError

BENCHMARKS: dict[str, tuple[str, str]] = {
    "collectives": (
        "megatron.efa.bench.collectives",
        "collectives, flat and on two levels",
    ),
    "expert": ("megatron.efa.bench.expert", "dispatch and combine of an expert layer"),
    "kernels": ("megatron.efa.bench.kernels", "row kernels of the expert path, on a GPU"),
    "layer": ("megatron.efa.bench.layer", "an expert layer's matrix products beside their peak"),
    "placement": ("megatron.efa.bench.placement", "orders of hosts, by traffic x distance"),
    "startup": ("megatron.efa.bench.startup", "making the process groups, upstream's way and ours"),
    "step": ("megatron.efa.bench.step", "training steps with each path on and off"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks; a benchmark declares its own options once it is chosen."""
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="WHAT", parser_class=_Late
    )
    for name, (module, summary) in BENCHMARKS.items():
        commands.add_parser(name, help=summary, description=summary).module = module


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark; returns its exit code. Raises EfaError without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise EfaError("benchmarks need PyTorch: pip install 'megatron-efa[torch]'")
    # Megatron asks at import whether there is a GPU. By the driver's library, then: the runtime,
    # once it has been asked anything, refuses to work in a fork, which the ranks are.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return importlib.import_module(BENCHMARKS[args.benchmark][0]).run(args)


class _Late(argparse.ArgumentParser):
    """A parser that asks its benchmark for options once words reach it."""

    module = ""

    def parse_known_args(self, *words: Any, **more: Any) -> Any:
        module, self.module = self.module, ""
        if module:
            importlib.import_module(module).add_arguments(self)
        return super().parse_known_args(*words, **more)
