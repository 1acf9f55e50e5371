"""The cluster around the node: kinds, topology, Slurm's and Kubernetes' settings, names."""

import json
import re
from collections.abc import Iterable
from typing import Any

from megatron.efa.cluster.catalogue import kinds, machine
from megatron.efa.cluster.discover import slurm
from megatron.efa.cluster.discover.assemble import some
from megatron.efa.doctor.context import Context
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, ok, warn
from megatron.efa.fabric.versions import holds

_LOST = 3
"""Names that do not resolve, after which no more are tried: each costs a resolver's time-out."""
_PLUGIN_IMAGE = re.compile(r"efa-k8s-device-plugin:v?(\d+\.\d+\.\d+)")


def _cluster(context: Context) -> Any:
    if context.cluster is None:
        raise Skip("no description of the cluster: give --from SOURCE")
    return context.cluster


@check("instance-mix", "all nodes are of one kind", once=True)
def instance_mix(host: Host, context: Context) -> Iterable[Finding]:
    nodes = _cluster(context).nodes
    count: dict[str, list[str]] = {}
    for node in nodes:
        count.setdefault(node.kind or "unknown", []).append(node.name)
    if set(count) == {"unknown"}:
        raise Skip("the description does not say what kind its nodes are")
    if len(count) == 1 and len({node.gpus for node in nodes}) == 1:
        yield ok(f"{len(nodes)} {next(iter(count))}")
        return
    common = max(count.values(), key=len)
    odd = [name for names in count.values() if names is not common for name in names]
    yield fail(
        " and ".join(f"{len(names)} {kind}" for kind, names in count.items()),
        some(odd or [node.name for node in nodes]),
        why="each step waits for the slowest node, ranks differ in rails, and EFA does not carry "
        "traffic between some families",
        do="take nodes of one kind (sbatch --constraint, a node selector)",
    )


@check("topology-labels", "the network path of every node is known", once=True)
def topology_labels(host: Host, context: Context) -> Iterable[Finding]:
    nodes = _cluster(context).nodes
    lost = [node.name for node in nodes if not node.path or "" in node.path]
    layers = {k: machine(k).layers for k in {n.kind for n in nodes} if k in kinds()}
    short = [
        node.name for node in nodes
        if node.path and layers.get(node.kind) not in (None, len(node.path))
    ]  # fmt: skip
    if not layers.keys() and len(lost) == len(nodes):
        raise Skip("neither kinds nor network paths are known")
    if all(value is None for value in layers.values()) and len(lost) == len(nodes):
        raise Skip("the topology API does not tell the paths of this kind")
    if lost or short:
        what = (
            f"no network path of {some(lost)}" if lost else f"a layer is missing on {some(short)}"
        )
        yield warn(
            what,
            _cluster(context).source,
            why="ranks cannot be placed by distance; sorting by what is there can put "
            "neighbours far apart. The cloud provider sets no label at all without "
            "ec2:DescribeInstanceTopology",
            do="allow it, then discover again (a refusal is remembered for 24 hours); p6 nodes "
            "have 4 layers, others 3",
        )
    else:
        yield ok(f"{len(nodes)} paths, {len(nodes[0].path)} layers")


@check("slurm-blocks", "every node is in a block of Slurm's topology", ["F24"], once=True)
def slurm_blocks(host: Host, context: Context) -> Iterable[Finding]:
    _, blocks = slurm.topology(host.printed("scontrol", "show", "topology"))
    if not blocks:
        raise Skip("Slurm's topology has no blocks")
    listed = host.environ.get("SLURM_JOB_NODELIST", "")
    if not listed:  # outside a job: the nodes with GPUs, for a login node is in no block
        rows = host.printed("sinfo", "-h", "-o", "%N %G").splitlines()
        listed = ",".join(row.split()[0] for row in rows if "gpu" in row.partition(" ")[2])
    nodes = slurm.expand(listed)
    lost = [name for name in nodes if name not in blocks]
    if lost:
        yield fail(
            f"{some(lost)} in no block",
            "scontrol show topology",
            why="Slurm 25.11 takes powered-down nodes out of their blocks and does not put them "
            "back: jobs with --exclusive=topo or --segment wait without end",
            do="scontrol reconfigure; Topology=default:BLOCK on the nodes' lines keeps it so",
        )
    else:
        yield ok(f"{len(nodes)} nodes in {len(set(blocks.values()))} blocks")


@check("slurm-resume", "HyperPod can resume a job after a fault", ["F23"], once=True)
def slurm_resume(host: Host, context: Context) -> Iterable[Finding]:
    if not host.exists("/opt/sagemaker_cluster"):
        raise Skip("this is no HyperPod cluster")
    said = host.printed("scontrol", "show", "config")
    value = dict(re.findall(r"^(\w+)\s*= ?(.*)$", said, re.MULTILINE))
    task, flags = value.get("TaskPlugin", ""), value.get("PrologFlags", "")
    wrong = []
    if task.strip() not in ("", "task/none", "(null)"):
        wrong.append(f"TaskPlugin={task.strip()}")
    if "alloc" in flags.lower():
        wrong.append(f"PrologFlags={flags.strip()}")
    if wrong:
        yield warn(
            " and ".join(wrong),
            "slurm.conf",
            why="srun --auto-resume=1 does not resume the job after a node's fault",
            do="TaskPlugin=task/none and no PrologFlags=Alloc, or let the job requeue itself",
        )
    else:
        yield ok("TaskPlugin and PrologFlags let auto-resume work")


@check("efa-device-plugin", "Kubernetes' EFA device plugin", ["F08", "F28"], once=True)
def device_plugin(host: Host, context: Context) -> Iterable[Finding]:
    said = json.loads(host.printed("kubectl", "get", "daemonsets", "-A", "-o", "json"))
    for item in said.get("items", ()):
        pod = item["spec"]["template"]["spec"]
        image = " ".join(container.get("image", "") for container in pod["containers"])
        version = _PLUGIN_IMAGE.search(image)
        if not version:
            continue
        name, status = item["metadata"]["name"], item.get("status", {})
        bad = False
        if not holds(">=0.5.10", version[1]):
            bad = True
            yield fail(
                f"the EFA device plugin is {version[1]}",
                f"daemonset {name}",
                why="before 0.5.10 it counts two adapters that are not EFA: a p6-b200 "
                "advertises 10 devices instead of 8, and traffic over them times out",
                do="upgrade it to 0.5.10 or newer",
            )
        limited = pod.get("nodeSelector") or pod.get("affinity", {}).get("nodeAffinity")
        if status.get("numberUnavailable") and not limited:
            bad = True
            yield warn(
                f"{status['numberUnavailable']} of its pods are not available",
                f"daemonset {name}",
                why="it has no node affinity: on nodes without EFA its pods crash again and again",
                do="restrict it to instance types with EFA",
            )
        if not bad:
            yield ok(f"device plugin {version[1]}")
        return
    raise Skip("no EFA device plugin among the daemonsets (the DRA driver, or no Kubernetes nodes)")


def peers(host: Host, context: Context) -> list[str]:
    """Names of the job's nodes that this one must reach."""
    listed = host.environ.get("SLURM_JOB_NODELIST", "")
    names = [node.address or node.name for node in context.cluster.nodes] if context.cluster else []
    names = names or slurm.expand(listed)
    master = host.environ.get("MASTER_ADDR") or host.environ.get("PET_MASTER_ADDR")
    return list(dict.fromkeys([*names, *([master] if master else [])]))


@check("dns", "names of the job's nodes resolve", login=True)
def dns(host: Host, context: Context) -> Iterable[Finding]:
    names = peers(host, context)
    if not names:
        raise Skip("no names: outside a job, without --from")
    lost, local = [], []
    for name in names:
        if len(lost) == _LOST:
            break
        answer = host.run("getent", "ahosts", name)
        if answer.code == 127:
            raise Skip("getent is not installed")
        addresses = {line.split()[0] for line in answer.text.splitlines() if line.split()}
        if answer.code or not addresses:
            lost.append(name)
        elif len(names) > 1 and all(a.startswith("127.") or a == "::1" for a in addresses):
            local.append(name)
    if lost:
        yield fail(
            f"{some(lost)} cannot be resolved",
            "getent ahosts",
            why="ranks cannot find each other: the rendezvous waits until its time is up",
            do="see /etc/resolv.conf and the VPC's DNS settings; in Kubernetes give the job a "
            "headless service; or put addresses into the description",
        )
    elif local:
        yield warn(
            f"{some(local)} resolves to this host alone (127.*)",
            "/etc/hosts",
            why="the head listens on loopback, or other nodes dial themselves",
            do="take the name off the 127.* lines of /etc/hosts",
        )
    else:
        yield ok(f"{len(names)} names")


@check("clock", "the clock is synchronized")
def clock(host: Host, context: Context) -> Iterable[Finding]:
    answer = host.run("chronyc", "-n", "tracking")
    offset = re.search(r"System time\s*: ([\d.]+) seconds", answer.text)
    if answer.code == 0 and offset:
        unsynchronized = "Not synchronised" in answer.text
        wrong = float(offset[1]) > 0.1
        what = f"{float(offset[1]) * 1e3:.3g} ms off"
    else:
        said = host.printed("timedatectl", "show", "-p", "NTPSynchronized", "--value")
        unsynchronized, wrong, what = said.strip() != "yes", False, "synchronized"
    if unsynchronized or wrong:
        yield warn(
            "the clock is not synchronized" if unsynchronized else f"the clock is {what}",
            "chronyc tracking",
            why="logs of nodes cannot be laid side by side, and signed requests to AWS are refused",
            do="start chronyd with the Amazon Time Sync Service",
        )
    else:
        yield ok(what)


@check("head-network", "the network allowance of this node is not exceeded", ["F30"], once=True)
def head_network(host: Host, context: Context) -> Iterable[Finding]:
    route = [line.split() for line in (host.text("/proc/net/route") or "").splitlines()[1:]]
    face = next((words[0] for words in route if len(words) > 1 and words[1] == "00000000"), "")
    if not face:
        raise Skip("no default route")
    said = host.printed("ethtool", "-S", face)
    over = re.findall(r"(\w+_allowance_exceeded): ([1-9]\d*)", said)
    if "allowance_exceeded" not in said:
        raise Skip(f"{face} has no allowance counters (not an ENA interface)")
    if over:
        yield warn(
            ", ".join(f"{name} {count}" for name, count in over),
            face,
            why="since boot this node's traffic has been cut: starts of many nodes that read "
            "images or files from it slow down or fail (about 36 nodes in one report)",
            do="put images and code on parallel storage, launch as a tree, or take a larger "
            "instance",
        )
    else:
        yield ok(f"{face}: no allowance exceeded")
