"""EFA devices: the right machine, as many as its kind has, all of them EFA's, all of them up."""

from collections.abc import Iterable

from megatron.efa.cluster.catalogue import kinds
from megatron.efa.doctor.context import Context, devices, driver, expected, wants_efa
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, ok, warn

_VERBS = "/sys/class/infiniband_verbs"
_DEVICES = "/sys/class/infiniband"


def _needs_devices(host: Host) -> None:
    if not devices(host) and not host.names(_VERBS):
        raise Skip("there is no device to look at (efa-devices)")


@check("machine-kind", "the node is of the kind that the job is for", ["F06"])
def machine_kind(host: Host, context: Context) -> Iterable[Finding]:
    if not host.kind:
        raise Skip("the firmware does not name an EC2 instance type")
    if host.kind not in kinds():
        yield warn(
            f"the catalogue does not know a {host.kind}",
            why="its EFA devices, GPUs and links cannot be checked, and lists by hand go stale",
            do="add it to megatron/efa/cluster/catalogue.yaml from DescribeInstanceTypes",
        )
    elif context.kind and context.kind != host.kind:
        yield fail(
            f"this is a {host.kind}, the job is for {context.kind}",
            why="numbers of EFA devices and GPUs, links and the plan of the layout differ: pods "
            "stay pending, or the job runs over a part of the network",
            do=f"start it on {context.kind} nodes, or plan and launch it for {host.kind} (--kind)",
        )
    else:
        yield ok(host.kind)


@check("efa-devices", "as many EFA devices as the kind has", ["F06", "F08"])
def efa_devices(host: Host, context: Context) -> Iterable[Finding]:
    machine = expected(host, context)
    found = len(devices(host))
    if machine.interfaces is None:
        raise Skip(f"the catalogue does not say how many EFA devices a {machine.kind} has")
    if found == machine.interfaces:
        yield ok(f"{found} EFA devices")
        return
    few = found < machine.interfaces
    yield fail(
        f"{found} EFA devices, a {machine.kind} has {machine.interfaces}",
        _DEVICES,
        why="NCCL uses the devices it sees: the job runs at that share of the network, or over TCP"
        if few
        else "some other adapter counts as EFA, and traffic sent over it times out",
        do="attach an EFA interface to every network card at launch; in a pod request "
        f"vpc.amazonaws.com/efa: {machine.interfaces}; on a p5en just booted, wait and look again"
        if few
        else "use the EFA device plugin 0.5.10 or newer",
    )


@check("efa-verbs", "no RDMA device of another vendor among EFA's", ["F05", "F08", "F09"])
def efa_verbs(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    _needs_devices(host)
    drivers = {name: driver(host, f"{_VERBS}/{name}") for name in host.names(_VERBS)}
    uverbs = {name: found for name, found in drivers.items() if name.startswith("uverbs")}
    seen = {name: d for name, d in uverbs.items() if host.exists(f"/dev/infiniband/{name}")}
    foreign = [f"{name} ({d or 'no driver'})" for name, d in seen.items() if d != "efa"]
    if foreign:
        yield fail(
            f"{len(foreign)} RDMA devices here are not EFA: {', '.join(foreign[:3])}",
            "/dev/infiniband",
            why="libfabric opens them and ends with -61, after which all traffic is TCP",
            do="in a pod: no hostPath mount of /dev/infiniband, take devices from the EFA device "
            "plugin; on a host: remove what exposes them",
        )
    locked = [name for name in seen if not host.writable(f"/dev/infiniband/{name}")]
    if locked:
        yield fail(
            f"{', '.join(locked[:3])} may not be opened by this user",
            "/dev/infiniband",
            why="libfabric finds no EFA device it can use, and NCCL falls back to TCP",
            do="give the job's user read and write access to /dev/infiniband/uverbs*",
        )
    missing = len(devices(host)) - sum(d == "efa" for d in seen.values())
    if missing > 0:
        yield fail(
            f"{missing} EFA devices have no /dev/infiniband/uverbs*",
            "/dev/infiniband",
            why="a container sees them in /sys but cannot open them",
            do="pass the devices in: docker --device=/dev/infiniband/uverbsN each, pyxis and the "
            "EFA device plugin do so by themselves",
        )
    if not foreign and not locked and missing <= 0:
        yield ok(f"{len(seen)} uverbs devices, all EFA's")


@check("efa-ports", "every EFA port is active")
def efa_ports(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    _needs_devices(host)
    down = [
        name
        for name in devices(host)
        if "ACTIVE" not in (host.text(f"{_DEVICES}/{name}/ports/1/state") or "")
    ]
    if down:
        yield fail(
            f"{len(down)} EFA ports are not active: {', '.join(down[:3])}",
            _DEVICES,
            why="ranks bound to them hang in their first collective",
            do="reboot the node; if they stay down, replace it",
        )
    else:
        yield ok(f"{len(devices(host))} ports active")


@check("ofed", "no Mellanox OFED beside the EFA driver", ["F09"])
def ofed(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    release = host.run("ofed_info", "-s")
    if release.code == 0 and "OFED" in release.text:
        yield warn(
            f"{release.text.strip().rstrip(':')} is installed",
            why="it replaces the kernel's RDMA modules, on which the EFA driver builds: EFA "
            "devices may be missing or its module may not load",
            do="remove MLNX OFED and install the EFA installer's rdma-core",
        )
    else:
        yield ok("no MLNX OFED")
