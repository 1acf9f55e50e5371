"""The environment of a job's ranks, and what is wrong with the one that it inherits."""

import re
from collections.abc import Mapping
from typing import Any

from megatron.efa.cluster.catalogue import Machine
from megatron.efa.errors import EfaError
from megatron.efa.fabric.environment import CPU, Verdict, needed, reasons, verdicts
from megatron.efa.launch.settings import Launch

_FABRICS = ("", "efa")


def of_job(
    launch: Launch, values: Mapping[str, Any], machine: Machine | None, cpu: bool
) -> dict[str, tuple[str, str]]:
    """Variable -> (value, why), of all that the ranks are given; `values` are Megatron's arguments.

    Raises EfaError for a variable of `launch.env` with which there is no EFA.
    """
    plugin = launch.plugin or None
    given: dict[str, tuple[str, str]] = {}
    if not cpu and (machine is None or (machine.fabric or "") in _FABRICS):
        why = reasons(plugin)
        given |= {name: (value, why[name]) for name, value in needed(plugin, _gpu(machine)).items()}
        for verdict in verdicts(launch.env, plugin):
            if verdict.level == "fail":
                raise EfaError(f"launch.env: {verdict}")
    if not cpu and (connections := device_connections(values, machine)):
        given["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    return given | {name: (value, "launch.env") for name, value in launch.env.items()}


def inherited(
    environ: Mapping[str, str], launch: Launch, given: Mapping[str, Any], cpu: bool
) -> list[Verdict]:
    """What is to be said of `environ`, of which ranks inherit what they are not given."""
    if cpu:
        return []
    return verdicts({k: v for k, v in environ.items() if k not in given}, launch.plugin or None)


def device_connections(
    values: Mapping[str, Any], machine: Machine | None
) -> tuple[str, str] | None:
    """CUDA_DEVICE_MAX_CONNECTIONS and why, or None where it does not matter.

    Megatron 0.19.2 (training/arguments.py) demands 1 for tensor and context parallelism before
    Blackwell; the overlap of experts' all-to-alls wants more, and 1 defeats it (Megatron-LM
    issues 2719 and 2730).
    """
    if values.get("use_megatron_fsdp") or values.get("use_torch_fsdp2"):
        return None
    if values.get("overlap_moe_expert_parallel_comm"):
        return "32", "experts' all-to-alls overlap"
    blackwell = bool(re.match(r"G?B\d", _gpu(machine)))
    sizes = ("tensor_model_parallel_size", "context_parallel_size")
    if not blackwell and any((values.get(size) or 1) > 1 for size in sizes):
        return "1", "tensor and context parallelism overlap, before Blackwell, by one queue"
    return None


def _gpu(machine: Machine | None) -> str:
    return (machine.gpu if machine else None) or "GPU"


__all__ = ["CPU", "device_connections", "inherited", "of_job"]
