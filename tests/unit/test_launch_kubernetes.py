"""Manifests of each kind of Kubernetes job, against the schemas that their operators publish.

Kubeflow's are typed models generated from the schemas, in the packages of the dev extra; HyperPod's
are in sagemaker-hyperpod, whose own dependencies would not fit: that test gets the one file.
"""

import importlib.util
import re
import subprocess
import sys
import zipfile

import pytest
import yaml

from megatron.efa.cluster.catalogue import machine
from megatron.efa.errors import EfaError
from megatron.efa.launch import cli, job

CONFIG = "examples/trillion/kimi-k2-p5en.yaml"
COMMON = [
    "launch.nodes=128",
    "launch.image=registry/megatron-efa:1",
    "launch.kubernetes.claims=[fsx:/fsx]",
    "launch.kubernetes.output=/fsx/runs/k2",
    "launch.kubernetes.queue=research",
]


def manifest(*words, target="kubernetes", machine="p5en.48xlarge"):
    made = job.build(CONFIG, [*COMMON, f"launch.kind={machine}", *words], target)
    return list(yaml.safe_load_all(cli.render(made)["job.yaml"]))


def pod(documents):
    """The pod template of a manifest's job."""
    return next(found for found in map(_find, documents) if found)


def _find(node):
    if isinstance(node, dict):
        if "containers" in node.get("spec", {}):
            return node
        return next((found for value in node.values() if (found := _find(value))), None)
    if isinstance(node, list):
        return next((found for value in node if (found := _find(value))), None)
    return None


TARGETS = {
    "trainjob": {"target": "kubernetes"},
    "pytorchjob": {"target": "kubernetes"},
    "hyperpod": {"target": "hyperpod"},
}


def of(kind, *words, **options):
    words = words if kind == "hyperpod" else (f"launch.kubernetes.kind={kind}", *words)
    return manifest(*words, **TARGETS[kind], **options)


def matches(value, type_name, models):
    """Assert that `value` is what generated models (openapi_types, attribute_map) call its type."""
    if wrapped := re.fullmatch(r"list\[(.*)\]", type_name):
        assert isinstance(value, list), (value, type_name)
        for item in value:
            matches(item, wrapped[1], models)
    elif wrapped := re.fullmatch(r"dict\((.*), (.*)\)", type_name):
        for key, item in value.items():
            matches(key, wrapped[1], models)
            matches(item, wrapped[2], models)
    elif type_name in ("str", "int", "bool", "float"):
        assert type(value).__name__ == type_name, (value, type_name)
    elif type_name != "object":
        model = next(m for m in (getattr(module, type_name, None) for module in models) if m)
        names = {json: name for name, json in model.attribute_map.items()}
        for key, item in value.items():
            assert key in names, f"{type_name} has no {key}"
            matches(item, model.openapi_types[names[key]], models)


def test_a_trainjob_and_its_runtime_fit_kubeflow_trainers_schema():
    api = pytest.importorskip("kubeflow_trainer_api.models")
    models = {
        "TrainJob": api.TrainerV1alpha1TrainJob,
        "TrainingRuntime": api.TrainerV1alpha1TrainingRuntime,
    }
    checked = 0
    for document in of("trainjob", "launch.kubernetes.node_selector=['a=b']"):
        if document["kind"] in models:
            model = models[document["kind"]].from_dict(document)
            assert model.to_dict() == document  # a field that it does not know would be dropped
            checked += 1
    assert checked == 2


def test_a_pytorchjob_fits_the_training_operators_schema():
    pytest.importorskip("kubeflow.training")
    from kubeflow.training import models
    from kubernetes.client import models as core

    document = of("pytorchjob", "launch.kubernetes.auto_resume=true")[-1]
    matches(document, "KubeflowOrgV1PyTorchJob", [models, core])
    document["spec"]["runPolicy"]["backoffLimits"] = 1
    with pytest.raises(AssertionError, match="has no backoffLimits"):
        matches(document, "KubeflowOrgV1PyTorchJob", [models, core])


@pytest.mark.network
def test_a_hyperpodpytorchjob_fits_hyperpods_schema(tmp_path):
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path)]
    got = subprocess.run([*command, "sagemaker-hyperpod>=3.12,<4"], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"no package index: {got.stderr.strip().splitlines()[-1]}")
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    file = "sagemaker/hyperpod/training/config/hyperpod_pytorch_job_unified_config.py"
    (tmp_path / "schema.py").write_bytes(wheel.read(file))
    spec = importlib.util.spec_from_file_location("hyperpod_schema", tmp_path / "schema.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["hyperpod_schema"] = module
    spec.loader.exec_module(module)
    document = of("hyperpod", "launch.kubernetes.required_topology=x")[-1]
    assert document["kind"] == "HyperPodPyTorchJob"
    module._HyperPodPytorchJob.model_validate(document["spec"], by_name=True)  # it forbids extras
    document["spec"]["runPolicy"]["retries"] = 1
    with pytest.raises(ValueError, match="retries"):
        module._HyperPodPytorchJob.model_validate(document["spec"], by_name=True)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", ["p4d.24xlarge", "p5.48xlarge", "p6-b300.48xlarge"])
def test_devices_are_counted_by_the_catalogue(kind, name):
    documents = of(kind, f"launch.nodes={1024 // machine(name).gpus}", machine=name)
    asked = pod(documents)["spec"]["containers"][0]["resources"]
    for side in ("requests", "limits"):
        assert asked[side]["nvidia.com/gpu"] == str(machine(name).gpus)
        assert asked[side]["vpc.amazonaws.com/efa"] == str(machine(name).interfaces)
    assert asked["requests"]["hugepages-2Mi"] == asked["limits"]["hugepages-2Mi"]
    assert "memory" not in asked["limits"]  # a pod killed for memory takes the job along


@pytest.mark.parametrize("kind", TARGETS)
def test_pods_get_devices_from_the_plugin_and_a_large_shm(kind):
    spec = pod(of(kind))["spec"]
    assert not any("hostPath" in volume for volume in spec["volumes"])
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    inside = {m["mountPath"]: m["name"] for m in spec["containers"][0]["volumeMounts"]}
    assert volumes[inside["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[inside["/fsx"]]["persistentVolumeClaim"]["claimName"] == "fsx"


def test_pods_are_told_no_path_of_this_machine():
    made = job.build(CONFIG, [*COMMON, "launch.kind=p5en.48xlarge"], "kubernetes")
    text = cli.render(made)["job.yaml"]
    assert str(job.ROOT) not in text
    assert f"WORKDIR {made.workdir}\n" in (job.ROOT / "Dockerfile").read_text()


def test_pods_stay_near_by_kueue_or_by_affinity():
    layer = "topology.k8s.aws/network-node-layer-"
    terms = pod(of("trainjob"))["spec"]["affinity"]["podAffinity"]
    asked = terms["preferredDuringSchedulingIgnoredDuringExecution"]
    weights = {t["podAffinityTerm"]["topologyKey"]: t["weight"] for t in asked}
    assert weights[f"{layer}3"] > weights[f"{layer}2"] > weights[f"{layer}1"] > 0
    kueue = pod(of("trainjob", f"launch.kubernetes.required_topology={layer}2"))
    assert kueue["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-required-topology": f"{layer}2"
    }
    assert "podAffinity" not in kueue["spec"]["affinity"]
    for document in of("trainjob")[1:]:
        if document["kind"] == "TrainJob":
            assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"


def test_what_pods_lack_is_told():
    with pytest.raises(EfaError, match=r"kubernetes.kind is 'trainjobs'.*did you mean trainjob"):
        manifest("launch.kubernetes.kind=trainjobs")
    with pytest.raises(EfaError, match=r"on none of launch\.kubernetes\.claims"):
        manifest("launch.kubernetes.output=/scratch/k2")
    with pytest.raises(EfaError, match=r"launch\.image is missing"):
        manifest("launch.image=null")
    with pytest.raises(EfaError, match=r"no machine 'p5en.48xlrge'; did you mean p5en.48xlarge"):
        manifest(machine="p5en.48xlrge")
