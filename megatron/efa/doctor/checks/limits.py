"""What the system lets a rank have: locked memory, huge pages, shared memory, memory, forks."""

import re
from collections.abc import Iterable

from megatron.efa.doctor.context import Context, devices, expected, wants_efa
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, info, ok, warn

GIB = 2**30
LEAST_LOCKED = 16 * GIB
"""What AWS's health check asks for (awsome-distributed-ai, gpu-cluster-healthcheck)."""
LEAST_MEMORY = 32 * GIB
"""A GPU's share of host memory below which ranks were killed: AWS's manifests ask 32000 Mi for a
worker of nccl-tests, and a limit of 8 GB ended one (known failure F15)."""
LEAST_SHM = 8 * GIB
"""Of /dev/shm a node: NCCL's channels between 8 GPUs and the data loaders' batches."""


@check("memlock", "locked memory is not limited", ["F14"])
def memlock(host: Host, context: Context) -> Iterable[Finding]:
    limits = host.text("/proc/self/limits")
    found = re.search(r"^Max locked memory\s+(\S+)", limits or "", re.MULTILINE)
    if not found:
        raise Skip("/proc/self/limits does not tell")
    if found[1] == "unlimited" or int(found[1]) >= LEAST_LOCKED:
        yield ok("unlimited" if found[1] == "unlimited" else f"{int(found[1]) / GIB:.0f} GiB")
        return
    text = f"locked memory is limited to {int(found[1]) / 2**20:.3g} MiB"
    if not devices(host):
        yield info(text, why="it matters where there is EFA")
        return
    yield fail(
        text,
        "/proc/self/limits",
        why="registering buffers fails: 'Libfabric error: (-12) Cannot allocate memory', "
        "'Failure to post internal receive buffers', and ranks abort",
        do="unlimited memlock for the daemon that starts ranks: LimitMEMLOCK=infinity for "
        "slurmd and containerd, --ulimit memlock=-1 for docker (IPC_LOCK does not help users "
        "other than root)",
    )


@check("hugepages", "huge pages for the EFA provider and for whoever forks", ["F13"])
def hugepages(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    base = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    total, free = host.text(f"{base}/nr_hugepages"), host.text(f"{base}/free_hugepages")
    if total is None or free is None:
        raise Skip(f"{base} is not there")
    if host.environ.get("FI_EFA_USE_HUGE_PAGE") == "0":
        yield ok("the provider does not use them (FI_EFA_USE_HUGE_PAGE=0)")
    elif int(total) and not int(free):
        yield warn(
            f"all {total} huge pages of 2 MiB are taken",
            base,
            why="the EFA provider falls back to small pages where it finds none, and a fork of a "
            "process that holds some ends with ENOMEM",
            do="raise vm.nr_hugepages (AWS's manifests give a node 5120 MiB), or set "
            "FI_EFA_USE_HUGE_PAGE=0",
        )
    else:
        yield ok(f"{free} of {total} free")


@check("fork-safety", "data loaders may fork beside the EFA provider", ["F13"])
def fork_safety(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    kernel = tuple(map(int, re.findall(r"\d+", host.text("/proc/sys/kernel/osrelease") or "")[:2]))
    if kernel and kernel < (5, 15):
        yield fail(
            f"Linux {kernel[0]}.{kernel[1]} does not copy registered memory on fork",
            "/proc/sys/kernel/osrelease",
            why="a forked data loader and its parent share pages that EFA writes: silent "
            "corruption",
            do="use a kernel of 5.15 or newer (any current DLAMI), or num_workers: 0",
        )
        return
    workers = context.get("num_workers", 2)  # Megatron's default
    if workers and host.environ.get("FI_EFA_USE_HUGE_PAGE") != "0":
        yield warn(
            f"{workers} data loader workers will fork and FI_EFA_USE_HUGE_PAGE is not 0",
            "FI_EFA_USE_HUGE_PAGE",
            why="huge pages that the EFA provider holds are copied at fork, and exhaust the pool: "
            "'OSError: [Errno 12] Cannot allocate memory' in the loader",
            do="set FI_EFA_USE_HUGE_PAGE=0 (a small cost), or num_workers: 0",
        )
    else:
        yield ok("no loader forks" if not workers else "FI_EFA_USE_HUGE_PAGE=0")


@check("shm", "/dev/shm is memory and large enough")
def shm(host: Host, context: Context) -> Iterable[Finding]:
    mounts = [line.split() for line in (host.text("/proc/mounts") or "").splitlines()]
    mounted = [m for m in mounts if len(m) > 2 and m[1] == "/dev/shm"]
    if not mounted:
        raise Skip("/proc/mounts has no /dev/shm")
    size, _ = space(host, "/dev/shm")
    if mounted[-1][2] != "tmpfs":
        yield warn(
            f"/dev/shm is {mounted[-1][2]}, not memory",
            "/dev/shm",
            why="what is shared between ranks goes to a disk, and is left behind by jobs",
            do="in a pod mount an emptyDir with medium: Memory there, not a hostPath",
        )
    elif size < LEAST_SHM and (devices(host) or context.kind):
        yield fail(
            f"/dev/shm has {size / 2**20:.0f} MiB",
            "/dev/shm",
            why="NCCL's channels between GPUs of a node and the data loaders' batches do not fit: "
            "'unable to allocate shared memory', or a bus error",
            do="docker: --ipc=host or --shm-size=64g; pod: an emptyDir with medium: Memory and "
            "sizeLimit: 64Gi",
        )
    else:
        yield ok(f"{size / GIB:.3g} GiB of tmpfs")


@check("memory-limit", "the cgroup leaves each GPU enough host memory", ["F15"])
def memory_limit(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    gpus = expected(host, context).gpus or 1
    limit = _cgroup(host, "memory.max", "memory/memory.limit_in_bytes")
    events = _cgroup(host, "memory.events", "memory/memory.oom_control") or ""
    killed = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
    if killed and int(killed[1]):
        yield fail(
            f"{killed[1]} processes were killed for lack of memory in this cgroup",
            "memory.events",
            why="the peers of a killed rank report 'Invalid receiver QPN' and look like the "
            "culprit",
            do="raise or drop the memory limit of the job",
        )
    elif limit is None:
        raise Skip("no memory controller in /sys/fs/cgroup")
    elif limit.isdecimal() and int(limit) < LEAST_MEMORY * gpus:
        yield fail(
            f"memory is limited to {int(limit) / GIB:.3g} GiB for {gpus} GPUs",
            "memory.max",
            why="the kernel kills a rank, and its peers report 'Invalid receiver QPN' (a pod's "
            "limit of 8 GB did that)",
            do=f"give {LEAST_MEMORY // GIB} GiB a GPU or more, or no limit",
        )
    else:
        yield ok("not limited" if not limit.isdecimal() else f"{int(limit) / GIB:.0f} GiB")


def _cgroup(host: Host, second: str, first: str) -> str | None:
    """A file of this process's cgroup: version 2 (its own, else the root's), or version 1."""
    own = re.search(r"^0::(\S+)$", host.text("/proc/self/cgroup") or "", re.MULTILINE)
    places = [f"/sys/fs/cgroup{own[1].rstrip('/')}/{second}"] if own else []
    for place in [*places, f"/sys/fs/cgroup/{second}", f"/sys/fs/cgroup/{first}"]:
        if (said := host.text(place)) is not None:
            return said
    return None


def space(host: Host, path: str) -> tuple[int, int]:
    """(size, free) bytes of the file system that holds `path`. Raises Skip if df does not tell."""
    said = host.printed("df", "-B1", "--output=size,avail", path).split()
    if len(said) < 2 or not said[-2].isdecimal():
        raise Skip(f"df does not tell the size of {path}")
    return int(said[-2]), int(said[-1])
