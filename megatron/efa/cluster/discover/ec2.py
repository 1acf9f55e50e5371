"""A cluster from the EC2 API: which network nodes each instance hangs under.

DescribeInstanceTopology takes up to 100 ids a call and answers in pages; a vector of network nodes
begins at the top of the network and has 3 or 4 of them, by family. Ids of network nodes compare
within one account only.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.efa.cluster.discover import imds
from megatron.efa.cluster.discover.assemble import cluster_of, known, some
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError

BATCH = 100
_ATTEMPTS = 10


def discover(instances: Sequence[str] | None = None, client: Any = None) -> Cluster:
    """The running `instances`, in their order; None for all of this account's that have GPUs.

    `client` is a boto3 EC2 client; by default one of the region that the environment or the
    instance itself names. Raises EfaError without permission, boto3 or instances.
    """
    client = client or connect()
    described = _described(client, instances)
    if instances is not None:
        lost = [name for name in instances if name not in described]
        if lost:
            raise EfaError(f"EC2 knows no running instance {some(lost)}: give ids of running ones")
    gpus, notes = _gpus(client, sorted({i["InstanceType"] for i in described.values()}))
    chosen = [d for d in described.values() if gpus.get(d["InstanceType"], 0)]
    if not chosen:
        raise EfaError("EC2 tells of no running instance with GPUs: see the region and the account")
    topology, missing = _topology(client, [d["InstanceId"] for d in chosen])
    notes += missing
    nodes = [_node(entry, gpus, topology.get(entry["InstanceId"], {})) for entry in chosen]
    if instances is None:  # an order of their own: by place, then by name
        nodes.sort(key=lambda node: (node.path, node.name))
    zones = sorted({d.get("Placement", {}).get("AvailabilityZone", "") for d in chosen})
    if len(zones) > 1:
        notes.append(f"instances are in {' and '.join(zones)}: EFA does not leave a zone")
    return cluster_of(nodes, "EC2", notes)


def _node(entry: dict[str, Any], gpus: dict[str, int], topology: dict[str, Any]) -> Node:
    # An EFA-only interface has no address, and the name is the primary interface's.
    name = entry.get("PrivateDnsName", "").partition(".")[0] or entry["InstanceId"]
    block = topology.get("CapacityBlockId") or ""
    spans = known(entry["InstanceType"]).domain_gpus is not None
    return Node(
        name,
        gpus[entry["InstanceType"]],
        tuple(topology.get("NetworkNodes") or ()),
        kind=entry["InstanceType"],
        domain=block if spans and block != "null" else "",
        address=entry.get("PrivateIpAddress", ""),
        instance=entry["InstanceId"],
    )


def _described(client: Any, instances: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Running instances by id, in the order of `instances`."""
    running = [{"Name": "instance-state-name", "Values": ["running"]}]
    found: dict[str, dict[str, Any]] = {}
    for ids in _batches(instances) if instances is not None else [None]:
        more = {"Filters": running} if ids is None else {"InstanceIds": ids}
        for page in _pages(client, "describe_instances", **more):
            for reservation in page["Reservations"]:
                for entry in reservation["Instances"]:
                    if entry.get("State", {}).get("Name", "running") == "running":
                        found[entry["InstanceId"]] = entry
    return found if instances is None else {i: found[i] for i in instances if i in found}


def _gpus(client: Any, types: list[str]) -> tuple[dict[str, int], list[str]]:
    """GPUs of each type, by the API, else by the catalogue."""
    notes: list[str] = []
    counts = {kind: known(kind).gpus or 0 for kind in types}
    try:
        for ids in _batches(types):
            for page in _pages(client, "describe_instance_types", InstanceTypes=ids):
                for entry in page["InstanceTypes"]:
                    gpus = entry.get("GpuInfo", {}).get("Gpus", ())
                    counts[entry["InstanceType"]] = sum(gpu.get("Count", 0) for gpu in gpus)
    except _Denied as denied:
        notes.append(f"{denied}: numbers of GPUs are the catalogue's")
    return counts, notes


def _topology(client: Any, ids: list[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What the topology API tells of each instance; notes where it does not."""
    found: dict[str, dict[str, Any]] = {}
    try:
        for batch in _batches(ids):
            for page in _pages(client, "describe_instance_topology", InstanceIds=batch):
                found |= {entry["InstanceId"]: entry for entry in page["Instances"]}
    except _Denied as denied:
        return {}, [f"{denied}: network paths not known"]
    lost = [i for i in ids if i not in found]
    notes = [f"the topology API leaves out {some(lost)}"] if lost else []
    return found, notes


def _batches(ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), BATCH):
        yield list(ids[start : start + BATCH])


class _Denied(Exception):
    """The account may not ask this."""


def _pages(client: Any, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """All pages of an answer; boto3 itself backs off and tries again where it is throttled."""
    from botocore.exceptions import BotoCoreError, ClientError

    token: dict[str, str] = {}
    while True:
        try:
            page = getattr(client, operation)(**arguments, **token)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            action = "".join(word.capitalize() for word in operation.split("_"))
            if code in ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException"):
                if operation == "describe_instances":
                    raise EfaError(
                        "EC2 refuses DescribeInstances: allow ec2:DescribeInstances, "
                        "ec2:DescribeInstanceTypes and ec2:DescribeInstanceTopology"
                    ) from error
                raise _Denied(f"EC2 refuses {action} (allow ec2:{action})") from error
            raise EfaError(f"EC2 answers {action} with {code}: {_message(error)}") from error
        except BotoCoreError as error:
            raise EfaError(f"EC2 cannot be asked: {error}") from error
        yield page
        if not page.get("NextToken"):
            return
        token = {"NextToken": page["NextToken"]}


def _message(error: Any) -> str:
    return error.response["Error"].get("Message", "no reason given")


def connect() -> Any:
    """A boto3 EC2 client of the region that the environment or the instance names."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise EfaError("--from ec2 needs boto3: pip install 'megatron-efa[aws]'") from error
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    patient = Config(retries={"mode": "adaptive", "total_max_attempts": _ATTEMPTS})
    region = region or boto3.session.Session().region_name or imds.identity().region
    return boto3.client("ec2", region_name=region, config=patient)
