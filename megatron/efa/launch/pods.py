"""What the pods of every kind of Kubernetes job share: devices, memory, volumes, topology."""

from typing import Any

from megatron.efa.cluster.catalogue import Machine
from megatron.efa.errors import EfaError
from megatron.efa.launch.job import Job

RECORD = "/etc/megatron-efa"
"""Where pods see run.json and config.yaml, from a ConfigMap."""
RUN_LABEL = "megatron-efa/run"
_LAYER = "topology.k8s.aws/network-node-layer-"
_KIND = "node.kubernetes.io/instance-type"


def metadata(job: Job, suffix: str = "") -> dict[str, Any]:
    """Name, namespace and labels (with Kueue's queue) of an object of the job."""
    options = job.launch.kubernetes
    labels = {RUN_LABEL: job.name}
    if options.queue:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    if options.priority:
        labels["kueue.x-k8s.io/priority-class"] = options.priority
    return {"name": job.name + suffix, "namespace": options.namespace, "labels": labels}


def config_map(job: Job, texts: dict[str, str]) -> dict[str, Any]:
    """The record of the run as pods read it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, "-record"),
        "data": {
            k: v for k, v in texts.items() if k in ("run.json", "config.yaml", "cluster.yaml")
        },
    }


def template(job: Job, container: str, command: list[str], restart: str) -> dict[str, Any]:
    """The template of a pod, which fills a node; `container` is the name its operator wants."""
    pod = job.launch.kubernetes
    meta: dict[str, Any] = {"labels": {RUN_LABEL: job.name}}
    if annotations := _kueue(job):
        meta["annotations"] = annotations
    mounts = [{"name": name, "mountPath": path} for name, path in _claims(job)]
    inside: dict[str, Any] = {
        "name": container,
        "image": _image(job),
        "imagePullPolicy": pod.pull_policy,
        "command": command,
        "workingDir": job.workdir,
        "env": _environment(job),
        "resources": _resources(job, job.machine),
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},  # to pin memory for EFA
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "record", "mountPath": RECORD, "readOnly": True},
            *mounts,
        ],
    }
    spec: dict[str, Any] = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": job.launch.save_before_s,
        "affinity": _affinity(job, job.machine),
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [inside],
        "volumes": [
            {"name": "shm", "emptyDir": _shm(pod.shm)},
            {"name": "record", "configMap": {"name": f"{job.name}-record"}},
            *({"name": n, "persistentVolumeClaim": {"claimName": n}} for n, _ in _claims(job)),
        ],
    }
    for key, value in (
        ("serviceAccountName", pod.service_account),
        ("schedulerName", pod.scheduler),
    ):
        if value:
            spec[key] = value
    if pod.node_selector:
        spec["nodeSelector"] = dict(_pair(p, "=", "node_selector") for p in pod.node_selector)
    return {"metadata": meta, "spec": spec}


def _image(job: Job) -> str:
    if not job.launch.image:
        raise EfaError("launch.image is missing: pods need a container image with this project")
    return job.launch.image


def _environment(job: Job) -> list[dict[str, Any]]:
    """The node's name, by which ranks are placed; the rest comes from run.json, except under
    HyperPod's own launcher."""
    host = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    given = [{"name": name, "value": value} for name, (value, _) in job.variables.items()]
    return [{"name": "MEGATRON_EFA_HOST", "valueFrom": host}, *given]


def _resources(job: Job, machine: Machine) -> dict[str, Any]:
    """Requests equal limits for devices and huge pages, as Kubernetes demands."""
    devices = {"nvidia.com/gpu": str(job.ranks)}
    if machine.fabric == "efa":
        if not machine.interfaces:
            raise EfaError(
                f"the catalogue does not say how many EFA devices a {machine.kind} has: add it"
            )
        devices["vpc.amazonaws.com/efa"] = str(machine.interfaces)
    if job.launch.kubernetes.hugepages not in ("", "0"):
        devices["hugepages-2Mi"] = job.launch.kubernetes.hugepages
    return {"requests": {**devices, "memory": job.launch.kubernetes.memory}, "limits": devices}


def _shm(size: str) -> dict[str, str]:
    return {"medium": "Memory", "sizeLimit": size} if size else {"medium": "Memory"}


def _claims(job: Job) -> list[tuple[str, str]]:
    return [_pair(claim, ":", "claims") for claim in job.launch.kubernetes.claims]


def _pair(text: str, by: str, key: str) -> tuple[str, str]:
    left, _, right = text.partition(by)
    if not left or not right:
        raise EfaError(f"launch.kubernetes.{key} has '{text}': write it as NAME{by}VALUE")
    return left, right


def _kueue(job: Job) -> dict[str, str]:
    """Kueue's topology-aware scheduling: all pods under one node of a layer, or as few as can be."""
    pod = job.launch.kubernetes
    if pod.required_topology and pod.preferred_topology:
        raise EfaError(
            "launch.kubernetes has both required_topology and preferred_topology: give one"
        )
    kinds = {"required": pod.required_topology, "preferred": pod.preferred_topology}
    return {f"kueue.x-k8s.io/podset-{k}-topology": label for k, label in kinds.items() if label}


def _affinity(job: Job, machine: Machine) -> dict[str, Any]:
    """Nodes of the kind; without Kueue's topology, near other pods of the run, layer by layer."""
    wanted = {"key": _KIND, "operator": "In", "values": [machine.kind]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}
    found: dict[str, Any] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    }
    if not _kueue(job) and machine.layers:
        mine = {"matchLabels": {RUN_LABEL: job.name}}
        found["podAffinity"] = {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100 * layer // machine.layers,  # the bottom layer counts most
                    "podAffinityTerm": {"labelSelector": mine, "topologyKey": f"{_LAYER}{layer}"},
                }
                for layer in range(machine.layers, 0, -1)
            ]
        }
    return found
