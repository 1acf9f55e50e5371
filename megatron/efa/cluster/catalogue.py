"""Kinds of machines: what `catalogue.yaml` says of them, and the links that follow from it."""

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.efa.cluster.model import Link
from megatron.efa.config.nearest import hint
from megatron.efa.errors import EfaError

PATH = Path(__file__).with_name("catalogue.yaml")

FAR_SHARE = 0.86
"""Of the line rate, what large NCCL all-to-alls level off at: 43 of 50 GB/s a GPU on 2 to 8 p5
nodes, by least squares on crazyguitar/aws-gpu-communication-benchmark's sweep (NCCL 2.28.7)."""
NEAR_SHARE = 0.8
"""Of NVLink's rate one way, what a large NCCL all-reduce reaches: 231 of 300 GB/s on p4d, 723 to
846 of 900 on p6-b200 (awslabs/awsome-distributed-ai)."""
NEAR_LATENCY_S = 5e-6
"""Of a transfer inside a node, started: NCCL's own order of magnitude."""


@dataclass(frozen=True)
class Machine:
    """A kind of node. None: not known."""

    kind: str
    gpus: int | None = None
    gpu: str | None = None
    gpu_memory_gb: float | None = None
    nvlink_gb_s: float | None = None
    """GB/s of a GPU, one way; None over PCIe."""
    domain_gpus: int | None = None
    """GPUs of an NVLink domain, where it spans nodes."""
    interfaces: int | None = None
    network_gbit_s: float | None = None
    """Of the node, one way."""
    fabric: str | None = None
    gpudirect: bool | None = None
    layers: int | None = None
    latency_us: float | None = None
    sources: tuple[str, ...] = ()
    peak: dict[str, float] = field(default_factory=dict)
    """Dense operations a second of one GPU by precision: bf16, fp8, ..."""
    memory_bytes_s: float | None = None
    """Of one GPU's memory."""

    @property
    def near(self) -> Link | None:
        """Between two GPUs of a node (or NVLink domain); None where that is not known."""
        if self.nvlink_gb_s is None:
            return None
        return Link(NEAR_SHARE * self.nvlink_gb_s * 1e9, NEAR_LATENCY_S)

    @property
    def far(self) -> Link | None:
        """One GPU's share of the network; None where rate or latency is not known."""
        if not (self.gpus and self.network_gbit_s and self.latency_us):
            return None
        rate = self.network_gbit_s * 1e9 / 8 / self.gpus
        return Link(FAR_SHARE * rate, self.latency_us * 1e-6)


@functools.cache
def _catalogue() -> dict[str, Any]:
    import yaml

    return yaml.safe_load(PATH.read_text())


def kinds() -> list[str]:
    """All kinds, in the catalogue's order."""
    return list(_catalogue()["machines"])


@functools.cache
def machine(kind: str) -> Machine:
    """The machine called `kind`. Raises EfaError if the catalogue has none such."""
    catalogue = _catalogue()
    if kind not in catalogue["machines"]:
        raise EfaError(
            f"the catalogue has no machine '{kind}'{hint(kind, catalogue['machines'])}; it is in "
            f"{PATH}, to which kinds are added without code"
        )
    entry = dict(catalogue["machines"][kind])
    gpu = dict(catalogue["gpus"].get(entry.get("gpu"), {}))
    sources = (*entry.pop("sources", ()), *gpu.pop("sources", ()))
    named = tuple(dict.fromkeys(catalogue["sources"][source] for source in sources))
    memory = gpu.pop("memory_bytes_s", None)
    return Machine(
        kind,
        **entry,
        sources=named,
        peak={precision: float(rate) for precision, rate in gpu.items()},
        memory_bytes_s=None if memory is None else float(memory),
    )
