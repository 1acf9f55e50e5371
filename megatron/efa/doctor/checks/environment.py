"""Variables of NCCL, libfabric and PyTorch that are set, but do harm or nothing any more."""

from collections.abc import Iterable

from megatron.efa.cluster.catalogue import kinds, machine
from megatron.efa.doctor import software
from megatron.efa.doctor.checks.plugin import found, installed
from megatron.efa.doctor.context import Context, devices
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, ok
from megatron.efa.fabric.environment import verdicts


@check("environment", "no variable does harm", ["F01", "F05", "F13", "F22"], login=True)
def environment(host: Host, context: Context) -> Iterable[Finding]:
    known = [kind for kind in (host.kind, context.kind) if kind in kinds()]
    if not devices(host) and not any(machine(kind).fabric == "efa" for kind in known):
        raise Skip("neither this machine nor the job's kind has EFA")
    _, place = found(host)
    place = place or next(iter(installed(host)), "")
    version = software.plugin(host, place) if place else ""
    judged = {k: v for k, v in host.environ.items() if k != "NCCL_NET_PLUGIN"}  # plugin-found
    said = verdicts(judged, version or None)
    for verdict in said:
        name = f"{verdict.name}={verdict.value}"
        where = f"for plugin {version or 'of unknown version'}; {verdict.source}"
        yield Finding(verdict.level, name, where, verdict.why, verdict.remedy)
    if not any(verdict.level in ("warn", "fail") for verdict in said):
        yield ok(f"{len(host.environ)} variables")
