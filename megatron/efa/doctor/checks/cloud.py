"""What the EC2 API says: security groups let EFA through, interfaces are attached, one zone."""

from collections.abc import Iterable
from typing import Any

from megatron.efa.cluster.catalogue import kinds, machine
from megatron.efa.cluster.discover.assemble import some
from megatron.efa.doctor.context import Context
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, info, ok
from megatron.efa.errors import EfaError

_EFA = ("efa", "efa-only")
BATCH = 100
"""Ids in one call, the API's limit for topology; kept for all."""


def _ask(host: Host, operation: str, **arguments: Any) -> dict[str, Any]:
    """One answer of the API. Raises Skip where it may not or cannot be asked."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise Skip("boto3 is not installed (pip install 'megatron-efa[aws]')") from error
    action = "".join(word.capitalize() for word in operation.split("_"))
    try:
        return getattr(host.ec2, operation)(**arguments)
    except ClientError as error:
        code, text = (error.response["Error"].get(key, "") for key in ("Code", "Message"))
        refused = code.startswith(("Unauthorized", "AccessDenied"))
        what = f"allow ec2:{action}" if refused else text or "no reason given"
        raise Skip(f"EC2 answers {action} with {code}: {what}") from error
    except (BotoCoreError, EfaError) as error:
        raise Skip(f"EC2 cannot be asked: {error}") from error


def _instances(host: Host, context: Context) -> list[dict[str, Any]]:
    """The job's instances as DescribeInstances has them; this one where no cluster is told."""
    nodes = context.cluster.nodes if context.cluster else ()
    ids = [node.instance for node in nodes if node.instance] or [host.instance]
    if not all(ids):
        raise Skip("no instance ids: give --from SOURCE")
    found = []
    for start in range(0, len(ids), BATCH):
        page = _ask(host, "describe_instances", InstanceIds=ids[start : start + BATCH])
        found += [i for reservation in page["Reservations"] for i in reservation["Instances"]]
    return found


@check(
    "security-group", "each group lets all traffic from and to itself through", ["F07"], once=True
)
def security_group(host: Host, context: Context) -> Iterable[Finding]:
    groups: dict[str, set[str]] = {}
    for instance in _instances(host, context):
        for interface in instance["NetworkInterfaces"]:
            if interface.get("InterfaceType") in _EFA:
                for group in interface.get("Groups", ()):
                    groups.setdefault(group["GroupId"], set()).add(instance["InstanceId"])
    if not groups:
        raise Skip("no EFA interface is attached (efa-interfaces)")
    said = _ask(host, "describe_security_groups", GroupIds=sorted(groups))["SecurityGroups"]
    bad = False
    for group in said:
        lacks = [
            name
            for name, rules in (
                ("ingress", group.get("IpPermissions", ())),
                ("egress", group.get("IpPermissionsEgress", ())),
            )
            if not any(_to_itself(rule, group["GroupId"]) for rule in rules)
        ]
        if lacks:
            bad = True
            yield fail(
                f"{group['GroupId']} has no {' and no '.join(lacks)} rule for all traffic to "
                "itself",
                f"on {some(sorted(groups[group['GroupId']]))}",
                why="EFA's addresses are neither IPv4 nor IPv6, so 0.0.0.0/0 does not match them: "
                "'Unresponsive receiver' (4126), or a hang in the first collective",
                do=f"add to {group['GroupId']} a rule: all protocols, "
                f"{'source' if 'ingress' in lacks else 'destination'} {group['GroupId']}"
                f"{', both directions' if len(lacks) == 2 else ''}",
            )
    shared = set.intersection(*map(set, _by_instance(groups).values()))
    if not shared and not bad:
        bad = True
        yield fail(
            "no security group is on all nodes",
            some(sorted(groups)),
            why="a group's rule for itself lets nothing of another group's through",
            do="put one common group with both self rules on every EFA interface",
        )
    if not bad:
        yield ok(f"{', '.join(sorted(groups))}: all traffic to itself, both directions")


def _to_itself(rule: dict[str, Any], group: str) -> bool:
    pairs = rule.get("UserIdGroupPairs", ())
    return rule.get("IpProtocol") == "-1" and any(p.get("GroupId") == group for p in pairs)


def _by_instance(groups: dict[str, set[str]]) -> dict[str, list[str]]:
    turned: dict[str, list[str]] = {}
    for group, instances in groups.items():
        for instance in instances:
            turned.setdefault(instance, []).append(group)
    return turned


@check("efa-interfaces", "EFA interfaces are attached, in one zone", ["F06"], once=True)
def interfaces(host: Host, context: Context) -> Iterable[Finding]:
    instances = _instances(host, context)
    types = sorted({i["InstanceType"] for i in instances})
    said = _ask(host, "describe_instance_types", InstanceTypes=types)["InstanceTypes"]
    most = {
        entry["InstanceType"]: entry.get("NetworkInfo", {})
        .get("EfaInfo", {})
        .get("MaximumEfaInterfaces", 0)
        for entry in said
    }
    bad = False
    for kind, limit in most.items():
        known = machine(kind).interfaces if kind in kinds() else None
        if known is not None and limit < known:
            bad = True
            yield fail(
                f"EC2 allows a {kind} {limit} EFA interfaces, the catalogue says {known}",
                "catalogue.yaml",
                why="plans, pod requests and checks count on the catalogue",
                do=f"correct {kind} in megatron/efa/cluster/catalogue.yaml",
            )
        elif known is None:
            yield info(
                f"EC2 allows a {kind} {limit} EFA interfaces; the catalogue does not know it"
            )
    short = []
    for i in instances:
        count = sum(n.get("InterfaceType") in _EFA for n in i["NetworkInterfaces"])
        kind = i["InstanceType"]
        wanted = (machine(kind).interfaces if kind in kinds() else None) or most.get(kind, 0)
        if count < wanted:
            short.append(f"{i['InstanceId']} ({count} of {wanted})")
    if short:
        bad = True
        yield fail(
            f"EFA interfaces are missing on {some(short)}",
            "DescribeInstances",
            why="NCCL uses the devices there are: the job runs at that share of the network",
            do="launch with one EFA interface on each network card that takes one (they cannot be "
            "added while an instance runs)",
        )
    zones = sorted({i.get("Placement", {}).get("AvailabilityZone", "") for i in instances})
    if len(zones) > 1:
        bad = True
        yield fail(
            f"instances are in {' and '.join(zones)}",
            "DescribeInstances",
            why="EFA does not leave an availability zone",
            do="launch all of them in one zone",
        )
    if not bad:
        yield ok(f"{len(instances)} instances in {zones[0]}, all EFA interfaces attached")
