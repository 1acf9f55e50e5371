"""GPUs and their driver: all there, CUDA's library the driver's, memory open to the network."""

import re
from collections.abc import Iterable

from megatron.efa.doctor import software
from megatron.efa.doctor.context import Context, expected, wants_efa
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, info, ok, warn
from megatron.efa.fabric.versions import numbers


def _query(host: Host, fields: str) -> list[list[str]]:
    text = host.printed("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    return [[cell.strip() for cell in row.split(",")] for row in text.strip().splitlines()]


@check("gpus", "as many GPUs as the kind has")
def gpus(host: Host, context: Context) -> Iterable[Finding]:
    machine = expected(host, context)
    rows = _query(host, "name")
    if machine.gpus is None:
        raise Skip(f"the catalogue does not say how many GPUs a {machine.kind} has")
    if len(rows) == machine.gpus:
        yield ok(f"{len(rows)} {rows[0][0]}")
    else:
        yield fail(
            f"{len(rows)} GPUs, a {machine.kind} has {machine.gpus}",
            "nvidia-smi",
            why="a GPU that has fallen off the bus takes its ranks and its rails with it",
            do="see dmesg for Xid lines; reboot or replace the node. In a container: request all",
        )


@check("gpu-health", "no GPU reports errors of memory, and none throttles")
def gpu_health(host: Host, context: Context) -> Iterable[Finding]:
    fields = (
        "index,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown,"
        "clocks_throttle_reasons.hw_thermal_slowdown"
    )
    sick = []
    for index, errors, slow, hot in _query(host, fields):
        if errors.isdecimal() and int(errors):
            sick.append(f"GPU {index} has {errors} uncorrectable memory errors")
        if "Active" in (slow, hot):
            sick.append(f"GPU {index} is slowed down by its hardware")
    if sick:
        yield fail(
            "; ".join(sick[:3]),
            "nvidia-smi",
            why="one slow GPU holds up every step of all others; one with errors ends the job",
            do="reset the GPU or replace the node",
        )
    else:
        yield ok("no uncorrectable errors, no slowdown")


@check("fabric-manager", "NVSwitch is set up")
def fabric_manager(host: Host, context: Context) -> Iterable[Finding]:
    if not (expected(host, context).nvlink_gb_s or 0):
        raise Skip("the kind has no NVLink")
    text = host.printed("nvidia-smi", "-q")
    states = re.findall(r"Fabric\s*\n\s*State\s*: (.+)", text)
    if not states:
        raise Skip("nvidia-smi -q tells no fabric state (no NVSwitch, or an older driver)")
    bad = [state.strip() for state in states if state.strip() not in ("Completed", "N/A")]
    if bad:
        yield fail(
            f"the fabric manager's state of {len(bad)} GPUs is '{bad[0]}'",
            "nvidia-smi -q",
            why="every CUDA call fails with error 802 (system not yet initialized)",
            do="wait a minute; then systemctl restart nvidia-fabricmanager, or replace the node",
        )
    else:
        yield ok(f"{len(states)} GPUs: {states[0].strip()}")


@check("cuda-compat", "CUDA's library is the driver's own where the driver is newer", ["F17"])
def cuda_compat(host: Host, context: Context) -> Iterable[Finding]:
    driver = numbers(software.gpu_driver(host))
    if not driver:
        raise Skip("no NVIDIA driver is loaded")
    places = [p for p in software.search(host, "libcuda.so.1") if host.exists(p)]
    if not places:
        raise Skip("the loader finds no libcuda.so.1")
    real = host.real(places[0])
    library = re.search(r"libcuda\.so\.(\d[\d.]*)$", real)
    compat = "/compat/" in places[0] or "/compat/" in real
    if compat and (not library or numbers(library[1]) < driver):
        yield fail(
            f"libcuda is {real}, older than the driver {'.'.join(map(str, driver))}",
            places[0],
            why="NCCL hangs at its start or in the first collective",
            do="take cuda-compat off LD_LIBRARY_PATH and out of /etc/ld.so.conf.d, then ldconfig",
        )
    else:
        yield ok(f"{real}, driver {'.'.join(map(str, driver))}")


@check("gpudirect", "EFA reads and writes GPU memory")
def gpudirect(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    machine = expected(host, context)
    if not machine.gpudirect:
        yield info(
            f"a {machine.kind} is not known to have GPUDirect RDMA",
            why="transfers are staged in host memory: put pipeline or data parallelism across "
            "nodes",
        )
        return
    modules = host.text("/proc/modules") or ""
    peer = re.search(r"^(efa_nv_peermem|nvidia_peermem|nv_peer_mem) ", modules, re.MULTILINE)
    # What the driver itself says: p2p (its provider), in older releases gdr (1 or 0).
    said = [host.text(f"/sys/class/infiniband/{_first(host)}/device/{a}") for a in ("p2p", "gdr")]
    # GPU memory is registered through the peer memory interface, or as a dmabuf (kernel 5.12).
    kernel = tuple(map(int, re.findall(r"\d+", host.text("/proc/sys/kernel/osrelease") or "")[:2]))
    if peer or "NVIDIA" in said or "1" in said:
        yield ok(peer[1] if peer else "the EFA driver has found NVIDIA's")
    elif kernel >= (5, 12) and numbers(software.efa_driver(host)) >= (1, 16):
        yield info(
            "no peer memory module: only dmabuf can register GPU memory",
            "/proc/modules",
            why="the plugin leaves dmabuf off unless OFI_NCCL_DISABLE_DMABUF=0",
            do="load efa_nv_peermem (it comes with the EFA installer) if transfers are slow",
        )
    else:
        yield fail(
            "neither a peer memory module nor dmabuf is there to register GPU memory",
            "/proc/modules",
            why="every transfer is staged in host memory, or registration fails",
            do="modprobe efa_nv_peermem, or run the EFA installer on the host",
        )


def _first(host: Host) -> str:
    from megatron.efa.doctor.context import devices

    return next(iter(devices(host)), "none")


@check("gdrcopy", "GDRCopy, where a backend of the config needs it")
def gdrcopy(host: Host, context: Context) -> Iterable[Finding]:
    needs = context.get("moe_flex_dispatcher_backend") == "deepep"
    if host.exists("/dev/gdrdrv"):
        yield ok("/dev/gdrdrv")
    elif needs:
        yield fail(
            "there is no /dev/gdrdrv",
            "/dev/gdrdrv",
            why="DeepEP over NVSHMEM (moe_flex_dispatcher_backend: deepep) needs GDRCopy's driver",
            do="install gdrdrv on the host (GDRCopy 2.5 or newer), or use another dispatcher",
        )
    else:
        raise Skip("nothing in the config needs GDRCopy")


@check("nccl-topology", "NCCL can read the processors' topology", ["F16"])
def nccl_topology(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    if host.environ.get("NCCL_TOPO_FILE"):
        file = host.environ["NCCL_TOPO_FILE"]
        if not host.exists(file):
            yield fail(
                f"NCCL_TOPO_FILE={file} is not there",
                "NCCL_TOPO_FILE",
                why="NCCL detects the topology by itself, and some containers hide it",
                do="correct the path, or unset it",
            )
            return
    nodes = [n for n in host.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", n)]
    blind = [n for n in nodes if not host.text(f"/sys/devices/system/node/{n}/cpumap")]
    if not nodes or blind:
        yield warn(
            f"/sys/devices/system/node tells no processors{f' of {blind[0]}' if blind else ''}",
            "/sys/devices/system/node",
            why="NCCL's topology detection may end with 'Attribute arch of node cpu not found'",
            do="expose the host's /sys to the container, or give NCCL_TOPO_FILE",
        )
    else:
        yield ok(f"{len(nodes)} NUMA nodes")
