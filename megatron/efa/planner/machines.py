"""What the planner needs of a GPU and its links: one row a GPU model.

Peaks are the vendor's dense figures as NVIDIA/dgxc-benchmarking uses them for MFU; memory and link
rates are the vendor's data sheets; rates between nodes are the line rate of one GPU's share.
"""

import re
from dataclasses import dataclass, replace

from megatron.efa.cluster import catalogue, describe
from megatron.efa.cluster.model import Cluster
from megatron.efa.errors import EfaError
from megatron.efa.planner import rates as curves
from megatron.efa.planner.rates import Measured

OLD_HOSTS = ("A100", "H100")
"""GPUs whose EFA hosts are of the older generation."""

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
    node: int = 8
    """GPUs of a host."""
    measured: Measured | None = None
    """Curves of a calibrated cluster, which then stand for all rates."""
    old_host: bool = False
    """Hosts and EFA of the generation of the published p5 runs, which are slower to launch."""


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


def host_of(kind: str) -> catalogue.Machine:
    """What the catalogue has of `kind`, or of a family's largest one. Raises EfaError."""
    sizes = [catalogue.machine(k) for k in catalogue.kinds() if k.split(".")[0] == kind]
    return max(sizes, key=lambda m: m.gpus or 0) if sizes else catalogue.machine(kind)


def of_kind(kind: str) -> Machine:
    """The machine of a kind of node in the catalogue, or of a family's largest one (`p5en`).

    Raises EfaError if the catalogue has none such, or the planner does not know its GPU.
    """
    node = host_of(kind)
    gpu = (node.gpu or "").split("-")[0]
    if gpu not in MACHINES or not node.gpus:
        raise EfaError(
            f"--cluster {kind}: the planner has no rates for its GPU ({node.gpu or 'not known'}); "
            f"it knows {', '.join(MACHINES)}"
        )
    far = (node.network_gbit_s or 0) * GIGA / 8 / node.gpus
    return replace(
        MACHINES[gpu],
        far=far or MACHINES[gpu].far,
        domain=node.domain_gpus or node.gpus,
        node=node.gpus,
        fabric="efa" if node.fabric == "efa" else "ib",
        old_host=node.fabric == "efa" and gpu in OLD_HOSTS,
    )


def of_word(word: str) -> tuple[Machine, Cluster | None]:
    """The machine that --cluster names: a family, a kind, or the YAML that describes a cluster.

    Raises EfaError if it names none.
    """
    if not word.endswith((".yaml", ".yml")):
        return of_kind(word), None
    cluster = describe.read(word)
    return of_cluster(cluster, word), cluster


def of_cluster(cluster: Cluster, file: str) -> Machine:
    """What the planner needs of a described cluster: curves if it is calibrated, else its kind's
    rates with the links of the description. Raises EfaError if it says neither."""
    rates = curves.of(cluster)
    sizes = {node.gpus for node in cluster.nodes}
    if len(sizes) > 1:
        raise EfaError(f"{file}: nodes have {sorted(sizes)} GPUs: the planner takes equal nodes")
    size = sizes.pop()
    kinds = sorted({node.kind for node in cluster.nodes} - {""})
    if rates is not None:
        peak = max(rate for _, points in rates.compute.gemm for _, rate in points)
        return Machine(
            rates.compute.kind, peak, peak, peak, rates.compute.memory, rates.compute.memory_rate,
            cluster.near.peak if cluster.near else 0.0, cluster.far.peak if cluster.far else 0.0,
            domain=size, fabric="none", node=size, measured=rates,
        )  # fmt: skip
    if len(kinds) != 1 or kinds == ["emulated"]:
        raise EfaError(
            f"{file}: nodes are of {' and '.join(kinds) or 'no named kind'}, and it was not "
            "calibrated: name one kind of the catalogue, or run `megatron-efa calibrate` there"
        )
    machine = of_kind(kinds[0])
    near = cluster.near.peak / catalogue.NEAR_SHARE if cluster.near else machine.near
    far = cluster.far.peak / catalogue.FAR_SHARE if cluster.far else machine.far
    return replace(machine, near=near, far=far, node=size, domain=max(machine.domain, size))


def of_gpu(gpu: str, interconnect: str = "") -> Machine:
    """The machine of a published row: its GPU's name, and what the row says of its links.

    Raises EfaError if the GPU is not known.
    """
    words = re.sub(r"^((NVIDIA|DGX)[ -]*)+", "", gpu.strip().upper()).split() or [""]
    key = words[0].split("-")[0]
    if key not in MACHINES:
        raise EfaError(
            f"gpu {gpu!r}: not known to the planner; known are {', '.join(sorted(MACHINES))}"
        )
    machine = MACHINES[key]
    text = interconnect.lower()
    if "efa" in text or re.search(r"\bp\d", text):
        machine = replace(machine, fabric="efa", old_host=key in OLD_HOSTS)
    return machine
