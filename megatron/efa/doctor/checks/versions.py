"""Installed releases against the matrix (`megatron/efa/fabric/versions.yaml`)."""

from collections.abc import Iterable

from megatron.efa.doctor import software
from megatron.efa.doctor.checks.plugin import found, installed
from megatron.efa.doctor.context import Context, wants_efa
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, info, ok, warn
from megatron.efa.fabric.versions import PATH, brought_by, holds, matrix, numbers, traps

_NAMES = {
    "installer": "EFA installer",
    "driver": "EFA driver",
    "libfabric": "libfabric",
    "plugin": "plugin",
    "nccl": "NCCL",
    "gpu_driver": "NVIDIA driver",
}


def versions(host: Host) -> dict[str, str]:
    """Version of each part that is found."""
    _, place = found(host)
    place = place or next(iter(installed(host)), "")
    said = {
        "installer": software.installer(host),
        "driver": software.efa_driver(host),
        "libfabric": software.libfabric(host),
        "plugin": software.plugin(host, place) if place else "",
        "nccl": software.nccl(host),
        "gpu_driver": software.gpu_driver(host),
    }
    return {part: version for part, version in said.items() if version}


@check("versions", "releases go together", ["F04", "F12", "F18", "F19", "F20"])
def matrix_check(host: Host, context: Context) -> Iterable[Finding]:
    wants_efa(host, context)
    have = versions(host)
    if not {"installer", "driver", "libfabric", "plugin"} & set(have):
        raise Skip("no part of EFA's software tells its version")
    text = ", ".join(f"{_NAMES[part]} {version}" for part, version in have.items())
    known = dict(have)
    if "libfabric" in have and "amzn" not in have["libfabric"]:
        known["upstream_libfabric"] = "1"
    if context.get("enable_ft_package") or context.get("inprocess_restart"):
        known["nvrx"] = software.package(host, "nvidia-resiliency-ext") or "0"
    caught = [trap for trap in traps() if trap.matches(known, host.environ)]
    for trap in caught:
        what = " with ".join(f"{_NAMES[p]} {have[p]}" for p in trap.when if p in have)
        yield (fail if trap.level == "fail" else warn)(
            what, str(PATH.name), why=trap.why, do=trap.do
        )
    low = [
        f"{_NAMES[part]} {have[part]} (under {floor})"
        for part, floor in matrix()["floors"].items()
        if part in have and not holds(f">={floor}", have[part])
    ]
    if low:
        yield warn(
            ", ".join(low),
            PATH.name,
            why="AWS's own tests refuse an image with it",
            do="use a newer one",
        )
    brought = brought_by(have.get("installer", ""))
    for part in ("libfabric", "plugin"):
        if part in have and part in brought and numbers(have[part]) != numbers(brought[part]):
            yield info(
                f"{_NAMES[part]} {have[part]}, but EFA {have['installer']} brought {brought[part]}",
                PATH.name,
                why="parts of different releases may not load together (see plugin-loads)",
            )
    if not caught and not low:
        yield ok(text)
