"""A job for Kubernetes, as one manifest of several documents: three kinds, one pod template."""

from collections.abc import Callable
from typing import Any

import yaml

from megatron.efa.config.nearest import hint
from megatron.efa.errors import EfaError
from megatron.efa.launch.job import Job
from megatron.efa.launch.node import PERMANENT
from megatron.efa.launch.pods import RECORD, config_map, metadata, template

_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_ITERATION = r".* iteration +(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+).*"
"""What Megatron prints each log interval (megatron-core 0.19.2, training/training.py)."""


def render(job: Job, texts: dict[str, str]) -> dict[str, str]:
    """The manifest; `texts` are the files of the run. Raises EfaError."""
    kind = "hyperpod" if job.target == "hyperpod" else job.launch.kubernetes.kind
    if kind not in KINDS:
        raise EfaError(
            f"launch.kubernetes.kind is '{kind}', but must be one of {', '.join(KINDS)}"
            f"{hint(kind, KINDS)}"
        )
    documents = [config_map(job, texts), *KINDS[kind](job)]
    dumped = (yaml.safe_dump(one, sort_keys=False, width=10**6) for one in documents)
    return {"job.yaml": "---\n".join(dumped)}


def trainjob(job: Job) -> list[dict[str, Any]]:
    """Kubeflow Trainer v2: a runtime of the run's own, and the TrainJob that uses it.

    Pods run once; a failure that a restart may mend starts all of them anew, by JobSet.
    """
    codes = {"containerName": "node", "operator": "In", "values": list(PERMANENT)}
    policy = {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": template(job, "node", _command(job), "Never"),
    }
    pods = {
        "name": "node",
        "template": {"metadata": {"labels": {_ANCESTOR: "trainer"}}, "spec": policy},
    }
    never = {
        "name": "permanent",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**metadata(job), "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": job.launch.restarts, "rules": [never]},
                    "replicatedJobs": [pods],
                }
            },
        },
    }
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(job),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": job.name,
            },
            "trainer": {"numNodes": job.nodes, "numProcPerNode": job.ranks},
        },
    }
    return [runtime, train]


def pytorchjob(job: Job) -> list[dict[str, Any]]:
    """Kubeflow's training operator v1. A pod with an exit code above 127 is started again."""
    pod = template(job, "pytorch", _command(job), "Never")
    del pod["spec"]["restartPolicy"]  # the operator sets it by the replica's
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    specs = {
        name: {"replicas": count, "restartPolicy": "ExitCode", "template": pod}
        for name, count in replicas.items()
        if count
    }
    meta = metadata(job)
    if job.launch.kubernetes.auto_resume:
        prefix = "sagemaker.amazonaws.com/"
        meta["annotations"] = {
            f"{prefix}enable-job-auto-resume": "true",
            f"{prefix}job-max-retry-count": str(job.launch.restarts),
        }
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": meta,
            "spec": {
                "nprocPerNode": str(job.ranks),
                "runPolicy": {
                    # Each pod that is started again counts, and a failure starts all of them.
                    "backoffLimit": job.launch.restarts * job.nodes,
                    "cleanPodPolicy": "None",
                },
                "pytorchReplicaSpecs": specs,
            },
        }
    ]


def hyperpod(job: Job) -> list[dict[str, Any]]:
    """HyperPod's operator with its elastic agent, which takes torchrun's place (hyperpodrun)."""
    logs = f"{job.out}/attempts/1"
    launcher = [
        *("hyperpodrun", "--server-host=0.0.0.0", "--server-port=8080"),
        *(f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks}"),
        *("--tee=3", f"--log_dir={logs}", f"--shutdown-timeout={job.launch.save_before_s}"),
    ]
    checked = ""
    if job.preflight:
        options = f"--kind {job.machine.kind} --nodes {job.nodes} --config {RECORD}/config.yaml"
        checked = f"{job.launch.python} -m megatron.efa doctor {options}; [ $? -le 1 ] || exit 3; "
    copied = f"mkdir -p {logs} && cp -L {RECORD}/*.* {job.out}/; "
    train = " ".join([*launcher, job.launch.script, "--config", f"{RECORD}/config.yaml"])
    command = ["bash", "-c", f"{checked}{copied}exec {train}"]
    hang = {
        "name": "iterations",
        "logPattern": _ITERATION,
        "expectedStartCutOffInSeconds": 3600,
        "expectedRecurringFrequencyInSeconds": 1800,
    }
    return [
        {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {**metadata(job), "annotations": _topology(job)},
            "spec": {
                "nprocPerNode": str(job.ranks),
                "replicaSpecs": [
                    {
                        "name": "node",
                        "replicas": job.nodes,
                        "template": template(job, "pytorch", command, "Never"),
                    }
                ],
                "runPolicy": {
                    "cleanPodPolicy": "None",
                    "jobMaxRetryCount": job.launch.restarts,
                    "logMonitoringConfiguration": [hang],
                },
            },
        }
    ]


def _topology(job: Job) -> dict[str, str]:
    """HyperPod's task governance reads Kueue's annotations from the job itself."""
    pod = template(job, "pytorch", [], "Never")
    return pod["metadata"].get("annotations", {})


def _command(job: Job) -> list[str]:
    return [job.launch.python, "-m", "megatron.efa.launch.node", RECORD]


KINDS: dict[str, Callable[[Job], list[dict[str, Any]]]] = {
    "trainjob": trainjob,
    "pytorchjob": pytorchjob,
    "hyperpod": hyperpod,
}
