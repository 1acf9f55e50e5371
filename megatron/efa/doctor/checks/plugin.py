"""The NCCL plugin for EFA: found under the name that NCCL opens, loadable, and selected.

The one proof is the positive line in NCCL's log; all that can be said before a run is what would
make it fail. NCCL_NET_PLUGIN=X opens X itself, then libnccl-net-X.so; unset, libnccl-net.so.
"""

import re
import sys
from collections.abc import Iterable

from megatron.efa.cluster.catalogue import Machine
from megatron.efa.doctor import software
from megatron.efa.doctor.context import Context, expected, wants_efa
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, info, ok, warn
from megatron.efa.fabric.versions import numbers

IMAGE = "/etc/megatron-efa/environment"
"""What our image's build wrote down of its environment (Dockerfile)."""
KNOWN = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/amazon/aws-ofi-nccl/lib",
    "/opt/aws-ofi-nccl/install/lib",
    "/opt/aws-ofi-nccl/lib",
)
"""Where plugins lie: stock package, older with a subdirectory, NGC's package, source builds."""
_SELECTED = re.compile(
    r"NET/OFI Selected provider is (\S+?),? fabric is (\S+) \(found (\d+) nics\)"
)
_DLOPEN = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


def wanted(host: Host) -> list[str]:
    """Library names that NCCL will try to open for its network, in order."""
    told = host.environ.get("NCCL_NET_PLUGIN", "")
    if not told:
        ngc = "NVIDIA_PYTORCH_VERSION" in host.environ
        newer = numbers(software.nccl(host)) >= (2, 29)
        return [*(["libnccl-net-aws-ofi.so"] if ngc and newer else []), "libnccl-net.so"]
    names = []
    for name in filter(None, (part.strip() for part in told.split(","))):
        names += [name] if "/" in name or name.endswith(".so") else [f"libnccl-net-{name}.so"]
    return names


def found(host: Host) -> tuple[str, str]:
    """(name that NCCL opens, file that it gets); empty strings where no name leads to a file."""
    for name in wanted(host):
        for place in software.search(host, name):
            if host.exists(place):
                return name, place
    return "", ""


def installed(host: Host) -> list[str]:
    """Plugins that lie where plugins for EFA are known to lie."""
    names = ("libnccl-net-ofi.so", "libnccl-net.so")
    paths = [f"{folder}/{name}" for folder in KNOWN for name in names]
    return [path for path in paths if host.exists(path)]


@check("plugin-found", "NCCL's plugin for EFA is the file that NCCL will open", ["F01", "F02"])
def plugin_found(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    name, place = found(host)
    here = installed(host)
    setting = f"NCCL_NET_PLUGIN={host.environ.get('NCCL_NET_PLUGIN', '(unset)')}"
    point = f"set NCCL_NET_PLUGIN={here[0]}" if here else (
        "install it (the EFA installer 1.38 or newer brings it), then set NCCL_NET_PLUGIN to "
        "its path"
    )  # fmt: skip
    ngc = host.environ.get("NVIDIA_PYTORCH_VERSION", "")
    trap = (
        f"; NGC images from 26.06 on (this is {ngc}) ship no EFA plugin and point NCCL at another"
        if numbers(ngc) >= (26, 6)
        else ""
    )
    if not place:
        dangling = [p for n in wanted(host) for p in software.search(host, n) if host.dangles(p)]
        what = f"NCCL will find none of {', '.join(wanted(host)) or 'no name'}"
        if dangling:
            what = f"{dangling[0]} is a link to nothing"
        yield fail(
            what,
            setting,
            why=f"NCCL says nothing and uses TCP, at a fraction of the speed{trap}",
            do=point,
        )
    elif b"NET/OFI" not in host.bytes(place):
        yield fail(
            f"NCCL will open {host.real(place)}, which is not the EFA plugin",
            setting,
            why=f"it cannot drive EFA: NCCL falls back to TCP without an error{trap}",
            do=point,
        )
    else:
        yield ok(f"{host.real(place)} as {name}")


@check("plugin-loads", "the plugin loads in this environment", ["F04", "F03"])
def plugin_loads(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    _, place = found(host)
    place = place or next(iter(installed(host)), "")
    if not place:
        raise Skip("there is no plugin to load (plugin-found)")
    answer = host.run(sys.executable, "-c", _DLOPEN, place)
    if answer.code == 0:
        version = software.plugin(host, place)
        yield ok(f"dlopen of {place}{f' ({version})' if version else ''}")
        return
    last = (answer.text.strip().splitlines() or ["no reason given"])[-1]
    other = "EFA_1" in last
    yield fail(
        f"it does not load: {last}",
        place,
        why="it was built against another libfabric or rdma-core than the one found here"
        if other
        else "NCCL skips a plugin that does not load, and uses TCP",
        do="use the plugin and libfabric of one EFA release (both from the installer), and put "
        "/opt/amazon/efa/lib first in LD_LIBRARY_PATH",
    )


@check("plugin-environment", "the launcher kept the image's library path", ["F03"])
def environment(host: Host, context: Context) -> Iterable[Finding]:
    said = host.text(IMAGE)
    where = IMAGE
    if said is None:
        raise Skip(f"{IMAGE} is not there: this is not the project's image")
    image = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    parts = [part for part in image.get("LD_LIBRARY_PATH", "").split(":") if part]
    kept = host.environ.get("LD_LIBRARY_PATH", "").split(":")
    lost = [f"LD_LIBRARY_PATH lacks {part}" for part in parts if part not in kept]
    if lost:
        yield fail(
            "; ".join(lost[:3]),
            where,
            why="a launcher between image and rank dropped it: the plugin is in the image, but "
            "ranks do not find it and use TCP",
            do="let the launcher pass the variable on (mpirun -x, srun --export=ALL, env in the "
            "pod)",
        )
    else:
        yield ok("LD_LIBRARY_PATH has all that the image's has")


@check("plugin-selected", "NCCL selected the plugin, by its own log", ["F01", "F02"])
def plugin_selected(host: Host, context: Context) -> Iterable[Finding]:
    if not context.logs:
        raise Skip("no NCCL log: give --log FILE of a run with NCCL_DEBUG=INFO")
    try:
        machine = expected(host, context)
    except Skip:
        machine = None
    for path in context.logs:
        text = path.read_text(errors="replace")
        yield from selected(text, str(path), machine)


def selected(text: str, where: str, machine: Machine | None) -> list[Finding]:
    """What a log of NCCL says of its network. The positive line counts, not the lack of errors."""
    lines = _SELECTED.findall(text)
    slow = "set NCCL_NET_PLUGIN to the plugin's full path, and NCCL_NET so that failing is an error"
    why = "everything between nodes goes over TCP, at a fraction of the speed"
    if "NET/Socket" in text and not lines:
        return [fail("NCCL uses sockets (NET/Socket)", where, why=why, do=slow)]
    if not lines:
        if "NCCL" not in text:
            return [
                warn(
                    "there is no line of NCCL in it",
                    where,
                    why="whether EFA carries traffic is not known",
                    do="run with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,NET",
                )
            ]
        return [
            fail(
                "no line 'NET/OFI Selected provider is efa'",
                where,
                why=f"without it {why}",
                do=slow,
            )
        ]
    found = []
    for provider, fabric, nics in sorted(set(lines)):
        count = machine.interfaces if machine else None
        if provider != "efa":
            do = "unset FI_PROVIDER"
            found.append(fail(f"the plugin selected {provider}, not efa", where, why=why, do=do))
        elif count is not None and int(nics) != count:
            found.append(
                warn(
                    f"the plugin found {nics} nics, a {machine.kind} has {count}",
                    where,
                    why="only those carry traffic; a plugin that groups devices counts groups",
                    do="see efa-devices and libfabric",
                )
            )
        else:
            found.append(ok(f"provider efa, fabric {fabric}, {nics} nics", where))
    if "NET/Socket" in text:
        found.append(
            info("some ranks also mention NET/Socket", where, "ranks may differ in environment")
        )
    return found
