"""The `launch:` group of a config: its keys, their types and defaults."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_type_hints

from megatron.efa.config.compose import Setting
from megatron.efa.config.nearest import hint
from megatron.efa.errors import EfaError


@dataclass(frozen=True)
class Slurm:
    """`launch.slurm`: options of sbatch and srun. Empty: left to the cluster."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    reservation: str = ""
    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    gres: str = ""
    """Where GPUs must be asked for even by jobs that have the node to themselves: gpu:8."""
    segment: int = 0
    """Nodes that must lie in one block (topology/block)."""
    switches: str = ""
    """Leaf switches at most, and how long to wait for them: 2@12:00:00 (topology/tree)."""
    exclusive_topology: bool = False
    """`--exclusive=topo`: blocks are not shared with other jobs."""
    auto_resume: str = "detect"
    """HyperPod's `--auto-resume=1`: on, off, or detect."""
    requeue: bool = True
    """Queue again when the time limit ends the job before its training does."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, as written there: --comment=x."""


@dataclass(frozen=True)
class Kubernetes:
    """`launch.kubernetes`."""

    kind: str = "trainjob"
    namespace: str = "default"
    output: str = ""
    """Folder in the pods, on a claim, where logs and checkpoints go."""
    claims: tuple[str, ...] = ()
    """PersistentVolumeClaims (FSx for Lustre, ...) and where they are mounted: fsx:/fsx."""
    queue: str = ""
    priority: str = ""
    required_topology: str = ""
    """Kueue: label of the layer under which all pods must lie."""
    preferred_topology: str = ""
    service_account: str = ""
    scheduler: str = ""
    node_selector: tuple[str, ...] = ()
    """label=value."""
    hugepages: str = "5120Mi"
    """Of 2 MiB each, a node (awslabs/awsome-distributed-ai's nccl-tests); 0: none."""
    memory: str = "32000Mi"
    """Asked for, a node; no limit is set, since a pod that is killed takes the job along."""
    shm: str = ""
    """Size of /dev/shm; empty: half of the node's memory, Kubernetes' default."""
    pull_policy: str = "IfNotPresent"
    auto_resume: bool = False
    """PyTorchJob on HyperPod EKS: HyperPod's annotations."""


@dataclass(frozen=True)
class Emulated:
    """`launch.emulated`."""

    rate: str = "1gbit"


@dataclass(frozen=True)
class Launch:
    """`launch`."""

    name: str = ""
    """Of the run; default: the config's file name."""
    runs: str = "runs/launch"
    """Folder of run folders, which all nodes must see (Kubernetes: kubernetes.output)."""
    nodes: int = 0
    ranks_per_node: int = 0
    """Default: the GPUs of `kind`."""
    kind: str = ""
    """Key of the catalogue: p5en.48xlarge."""
    cluster: str = ""
    """Description of the cluster, by which hosts get ranks: a file, ec2, slurm, kubernetes, ..."""
    plugin: str = ""
    """Version of aws-ofi-nccl in the image; empty: counts as the newest."""
    image: str = ""
    """Container image (Slurm: for pyxis, a squashfs file or a name); empty: no container."""
    mounts: tuple[str, ...] = ()
    """Of the container (Slurm): /fsx:/fsx."""
    python: str = "python3"
    workdir: str = ""
    """Of this project, on the nodes; default: where it is here; in pods as in the Dockerfile."""
    script: str = "pretrain_gpt.py"
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of the ranks."""
    master_port: int = 29500
    restarts: int = 3
    """After failures; not counted: the rerun machine's exit code 16, time limits."""
    time: str = ""
    """Slurm's time limit: 2-00:00:00."""
    save_before_s: int = 600
    """Seconds before the time limit (or the end of a pod) at which ranks are asked to save."""
    slurm: Slurm = field(default_factory=Slurm)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)
    emulated: Emulated = field(default_factory=Emulated)


def read(settings: Sequence[Setting]) -> Launch:
    """The `launch` group among `settings`. Raises EfaError naming file and key."""
    launch, names = Launch(), _names(Launch)
    for setting in settings:
        if setting.group != "launch":
            continue
        head, _, rest = setting.key.partition(".")
        if head == "env" and rest:
            launch = replace(launch, env=launch.env | {rest: _env(setting)})
        elif setting.key not in names:
            raise EfaError(
                f"{setting.where}: there is no key {setting.name}{hint(setting.key, names)}"
            )
        elif rest:
            section = replace(getattr(launch, head), **{rest: _value(setting, names)})
            launch = replace(launch, **{head: section})
        else:
            launch = replace(launch, **{head: _value(setting, names)})
    return launch


def _names(kind: type, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> type, of all that may be set."""
    hints, names = get_type_hints(kind), {}
    for item in fields(kind):
        if is_dataclass(hints[item.name]):
            names |= _names(hints[item.name], f"{prefix}{item.name}.")
        elif item.name != "env":
            names[prefix + item.name] = hints[item.name]
    return names


def _value(setting: Setting, names: dict[str, Any]) -> Any:
    wanted, value = names[setting.key], setting.value
    if wanted is str and type(value) in (int, float):
        return str(value)
    if wanted not in (str, int, bool):  # the only other type is a tuple of words
        words = value if isinstance(value, list) else [value]
        if all(isinstance(word, str) for word in words):
            return tuple(words)
        raise EfaError(f"{setting.where}: {setting.name} is {value!r}, but wants a list of words")
    if type(value) is not wanted:
        kind = {str: "text", int: "a whole number", bool: "true or false"}[wanted]
        raise EfaError(f"{setting.where}: {setting.name} is {value!r}, but wants {kind}")
    return value


def _env(setting: Setting) -> str:
    if isinstance(setting.value, list | bool):
        raise EfaError(f"{setting.where}: {setting.name} is {setting.value!r}, but wants text")
    return str(setting.value)
