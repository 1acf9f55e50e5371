"""A cluster from the labels of Kubernetes nodes: AWS's topology layers, NVLink domains, types.

Labels of layers are `topology.k8s.aws/network-node-layer-1` (the top) to -N. The cloud provider
sets none at all where it lacks the permission, and some versions only the first three.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from megatron.efa.cluster.discover.assemble import cluster_of, some
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError

LAYER = "topology.k8s.aws/network-node-layer-"
DOMAINS = ("nvidia.com/gpu.clique", "topology.k8s.aws/ultraserver-id")
KIND = "node.kubernetes.io/instance-type"
HOST = "kubernetes.io/hostname"
GPU = "nvidia.com/gpu"


def discover(file: Path | None = None) -> Cluster:
    """Nodes with GPUs, by name, of `kubectl get nodes -o json` or of its output in `file`.

    Raises EfaError if there are none or kubectl cannot tell.
    """
    said = _answer(file)
    source = f"Kubernetes nodes in {file}" if file else "Kubernetes nodes"
    nodes = [node for item in said.get("items", ()) if (node := _node(item)) is not None]
    if not nodes:
        raise EfaError(f"{source}: none has {GPU}: see whether the device plugin runs on them")
    nodes.sort(key=lambda node: node.name)
    notes = []
    gaps = [node.name for node in nodes if "" in node.path]
    if gaps:
        notes.append(f"a layer's label is missing on {some(gaps)}")
    if not any(node.path for node in nodes):
        notes.append(
            f"no node has {LAYER}1: the cloud provider needs ec2:DescribeInstanceTopology to set it"
        )
    return cluster_of(nodes, source, notes)


def _node(item: dict[str, Any]) -> Node | None:
    """None for a node without GPUs, or on which no pod may start."""
    labels = item.get("metadata", {}).get("labels", {})
    status, spec = item.get("status", {}), item.get("spec", {})
    gpus = int(status.get("allocatable", status.get("capacity", {})).get(GPU, 0))
    if not gpus or spec.get("unschedulable"):
        return None
    layers = {int(k.removeprefix(LAYER)): v for k, v in labels.items() if k.startswith(LAYER)}
    path = tuple(layers.get(i, "") for i in range(1, max(layers, default=0) + 1))
    addresses = {a["type"]: a["address"] for a in status.get("addresses", ())}
    domain = next((labels[name] for name in DOMAINS if labels.get(name)), "")
    return Node(
        item["metadata"]["name"],
        gpus,
        path,
        kind=labels.get(KIND, ""),
        domain=domain,
        address=addresses.get("InternalIP", ""),
        instance=spec.get("providerID", "").rpartition("/")[2],
    )


def _answer(file: Path | None) -> dict[str, Any]:
    try:
        if file is not None:
            text = file.read_text()
        else:
            command = ["kubectl", "get", "nodes", "-o", "json"]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if answer.returncode:
                reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise EfaError(f"kubectl get nodes failed: {reason}")
            text = answer.stdout
        said = json.loads(text)
    except FileNotFoundError as error:
        raise EfaError(
            f"there is no {error.filename}: give --from kubernetes:FILE with the output of "
            "kubectl get nodes -o json"
        ) from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise EfaError(f"the nodes of Kubernetes could not be read: {error}") from error
    if not isinstance(said, dict):
        raise EfaError(f"{file}: it is not what kubectl get nodes -o json prints")
    return said
