"""libfabric: it is Amazon's build, it runs, and it finds every EFA device."""

import re
from collections.abc import Iterable

from megatron.efa.doctor import software
from megatron.efa.doctor.context import Context, devices, wants_efa
from megatron.efa.doctor.host import ABSENT, Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, ok


@check("libfabric", "libfabric offers the efa provider on every device", ["F05", "F27"])
def libfabric(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    command = (software.program(host, "fi_info"), "-p", "efa", "-t", "FI_EP_RDM")
    answer, count = host.run(*command), len(devices(host))
    if answer.code == ABSENT:
        yield fail(
            "there is no fi_info",
            "/opt/amazon/efa/bin",
            why="without libfabric the plugin cannot load and NCCL uses TCP",
            do="run the EFA installer (in a container with -y -g -d --skip-kmod --skip-limit-conf "
            "--no-verify)",
        )
        return
    # Each device is listed by provider efa and, from libfabric 2 on, by its fabric efa-direct too.
    domains = set(re.findall(r"domain: (\S+)", answer.text))
    names = {re.sub(r"-(rdm|dgrm)$", "", domain) for domain in domains}
    if answer.code or not names:
        # rdma-core's part for EFA; what "fi_info -61" lacks when the installer left it out (F27)
        folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib/aarch64-linux-gnu")
        drivers = [n for f in folders for n in host.names(f"{f}/libibverbs")]
        lacks = not any(name.startswith("libefa") for name in drivers)
        last = (answer.text.strip().splitlines() or ["it printed nothing"])[-1]
        yield fail(
            f"fi_info -p efa finds no device ({last})",
            why="NCCL falls back to TCP without an error",
            do="install rdma-core with the EFA installer: on an NGC base it leaves it out unless "
            "called with --disable-build-ngc"
            if lacks
            else "see efa-verbs and efa-devices: devices of another vendor, or none passed in",
        )
    elif len(names) != count:
        yield fail(
            f"libfabric lists {len(names)} of {count} EFA devices",
            why="NCCL uses only those: the job runs at that share of the network",
            do="see FI_EFA_IFACE and FI_PROVIDER in the environment, and dmesg for the efa driver",
        )
    else:
        direct = ", efa-direct" if "efa-direct" in answer.text else ""
        yield ok(f"provider efa{direct} on {len(names)} devices")


@check("libfabric-build", "libfabric is Amazon's build", ["F18"])
def build(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    version = software.libfabric(host)
    if not version:
        raise Skip("fi_info --version did not tell")
    if "amzn" in version:
        yield ok(f"libfabric {version}")
    else:
        yield fail(
            f"libfabric {version} is not Amazon's build (no 'amzn' in its version)",
            why="upstream's libfabric and NCCL 2.28.9 deadlock",
            do="install libfabric with the EFA installer and put /opt/amazon/efa/lib first in "
            "LD_LIBRARY_PATH",
        )
