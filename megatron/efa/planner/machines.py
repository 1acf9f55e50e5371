"""What the planner needs of a GPU and its links: one row a GPU model.

Peaks are the vendor's dense figures as NVIDIA/dgxc-benchmarking uses them for MFU; memory and link
rates are the vendor's data sheets; rates between nodes are the line rate of one GPU's share.
"""

import re
from dataclasses import dataclass, replace

from megatron.efa.errors import EfaError

TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class Machine:
    """One GPU, the NVLink domain it is in and its share of the network."""

    name: str
    bf16: float
    """FLOP/s."""
    fp8: float
    fp4: float
    memory: float
    """Bytes."""
    memory_rate: float
    """Bytes per second."""
    near: float
    """Bytes per second, one way, to other GPUs of its domain."""
    far: float
    """Bytes per second, one way, to other nodes."""
    domain: int = 8
    """GPUs that NVLink joins."""
    fabric: str = "ib"
    """`efa`, `ib` or `none`."""
    old_host: bool = False
    """p5 and p5e: hosts and EFA of an earlier generation than the others' here."""


def _gpu(name: str, *figures: float, **more: object) -> Machine:
    bf16, fp8, fp4, memory, memory_rate, near, far = figures
    return Machine(
        name, bf16 * TERA, fp8 * TERA, fp4 * TERA, memory * 2**30, memory_rate * TERA,
        near * GIGA, far * GIGA, **more,
    )  # fmt: skip


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        # TFLOPS bf16, fp8, fp4; GiB; TB/s; GB/s near, far
        _gpu("A100", 312, 312, 312, 79.2, 2.0, 300, 25),
        _gpu("H100", 989, 1979, 1979, 79.2, 3.35, 450, 50),
        _gpu("H800", 989, 1979, 1979, 79.2, 3.35, 200, 50),
        _gpu("H200", 989, 1979, 1979, 139.8, 4.8, 450, 50),
        _gpu("B200", 2250, 4500, 9000, 178.4, 7.7, 900, 50),
        _gpu("B300", 2250, 4500, 13500, 267.7, 7.7, 900, 100),
        _gpu("GB200", 2450, 4900, 9800, 184, 7.7, 900, 50, domain=72),
        _gpu("GB300", 2450, 4900, 14700, 277, 7.7, 900, 100, domain=72),
    )
}


KINDS = {
    "p4d": ("A100", 50, True),
    "p4de": ("A100", 50, True),
    "p5": ("H100", 50, True),
    "p5e": ("H200", 50, True),
    "p5en": ("H200", 50, False),
    "p6-b200": ("B200", 50, False),
    "p6-b300": ("B300", 100, False),
    "p6e-gb200": ("GB200", 50, False),
}
"""Instance families: GPU, GB/s of EFA per GPU, whether the host is of the older generation."""


def of_kind(kind: str) -> Machine:
    """The machine of an EC2 instance type or family. Raises EfaError if it is not known."""
    family = kind.lower().split(".")[0]
    if family not in KINDS:
        raise EfaError(
            f"--cluster {kind}: not an instance family the planner knows; known are "
            f"{', '.join(KINDS)}"
        )
    gpu, far, old = KINDS[family]
    return replace(MACHINES[gpu], far=far * GIGA, fabric="efa", old_host=old)


def of_gpu(gpu: str, interconnect: str = "") -> Machine:
    """The machine of a published row: its GPU's name, and what the row says of its links.

    Raises EfaError if the GPU is not known.
    """
    key = re.sub(r"^(NVIDIA|DGX)[ -]*", "", gpu.strip().upper()).split()[0].split("-")[0]
    if key not in MACHINES:
        raise EfaError(
            f"gpu {gpu!r}: not known to the planner; known are {', '.join(sorted(MACHINES))}"
        )
    machine = MACHINES[key]
    text = interconnect.lower()
    if "efa" in text or re.search(r"\bp\d", text):
        machine = replace(machine, fabric="efa", old_host=key in ("A100", "H100"))
    return machine
