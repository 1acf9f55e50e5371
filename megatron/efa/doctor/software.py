"""Versions of what is installed, each read from the file or the program that says it best."""

import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.efa.doctor.host import Host

PACKAGES = "/opt/amazon/efa_installed_packages"
_PLUGIN = re.compile(rb"aws-ofi-nccl[ -]v?(\d+\.\d+\.\d+)")
_NCCL = re.compile(rb"NCCL version (\d+\.\d+\.\d+)")
_SYSTEM = ("/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu",
           "/lib/aarch64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib", "/usr/lib")  # fmt: skip


def installer(host: "Host") -> str:
    """Version of the EFA installer that ran here; empty if none left its mark."""
    found = re.search(r"EFA installer version: (\S+)", host.text(PACKAGES) or "")
    return found[1] if found else ""


def libfabric(host: "Host") -> str:
    """What `fi_info --version` says, as "2.4.0amzn1.0"; empty if there is no fi_info."""
    answer = host.run(program(host, "fi_info"), "--version")
    found = re.search(r"libfabric: (\S+)", answer.text)
    return found[1] if found and not answer.code else ""


def program(host: "Host", name: str) -> str:
    """A program of the EFA installer: it is on the path only after a new login."""
    installed = f"/opt/amazon/efa/bin/{name}"
    return installed if host.exists(installed) else name


def efa_driver(host: "Host") -> str:
    """Version of the loaded efa module; empty if it is not loaded, or the kernel's own."""
    return (host.text("/sys/module/efa/version") or "").rstrip("gK")


def gpu_driver(host: "Host") -> str:
    """Version of NVIDIA's kernel driver; empty if it is not loaded."""
    found = re.search(
        r"Kernel Module(?: for \S+)?\s+(\d+\.\d[\d.]*)",
        host.text("/proc/driver/nvidia/version") or "",
    )
    return found[1] if found else ""


def plugin(host: "Host", library: str) -> str:
    """Version that the plugin at `library` carries; else the package's; empty if neither says."""
    found = _PLUGIN.search(host.bytes(library))
    if found:
        return found[1].decode()
    listed = re.search(r"libnccl-ofi\S*: (\d+\.\d+\.\d+)", host.text(PACKAGES) or "")
    return listed[1] if listed else ""


def nccl(host: "Host") -> str:
    """Version of the NCCL that a job would load; empty if none is found."""
    for place in search(host, "libnccl.so.2"):
        found = re.search(r"\.so\.(\d+\.\d+\.\d+)$", host.real(place))
        if found:
            return found[1]
        if found := _NCCL.search(host.bytes(place)):
            return found[1].decode()
    return package(host, "nvidia-nccl-cu13") or package(host, "nvidia-nccl-cu12")


def package(host: "Host", name: str) -> str:
    """Version of a Python distribution beside this one; empty if it is not installed."""
    ask = f"from importlib.metadata import version; print(version('{name}'))"
    answer = host.run(sys.executable, "-c", ask)
    return answer.text.strip() if not answer.code else ""


def search(host: "Host", name: str) -> list[str]:
    """Where the loader finds library `name`, best first; links to nothing are among them.

    The order of dlopen: LD_LIBRARY_PATH, the loader's cache, the system's folders.
    """
    if "/" in name:
        return [name] if host.exists(name) or host.dangles(name) else []
    folders = [f for f in host.environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    found = [f"{f.rstrip('/')}/{name}" for f in folders]
    cache = host.run("ldconfig", "-p").text
    found += re.findall(rf"^\s*{re.escape(name)} \(.*\) => (\S+)$", cache, re.MULTILINE)
    found += [f"{folder}/{name}" for folder in _SYSTEM]
    seen = dict.fromkeys(found)
    return [place for place in seen if host.exists(place) or host.dangles(place)]
