"""What is to run where: a config and its `launch` group, checked and made complete."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.efa.cluster.catalogue import Machine, machine
from megatron.efa.cluster.discover import discover
from megatron.efa.cluster.model import Cluster
from megatron.efa.cluster.traffic import Sizes
from megatron.efa.config.compose import Setting, compose_all
from megatron.efa.config.show import show
from megatron.efa.config.words import LAUNCH
from megatron.efa.errors import EfaError
from megatron.efa.fabric.environment import Verdict
from megatron.efa.launch import environment, settings
from megatron.efa.launch.settings import Launch

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ("kubernetes", "hyperpod")
IN_IMAGE = "/opt/megatron-efa"
_LIVE = ("slurm",)
"""Sources of the cluster that only tell something inside the job."""


@dataclass(frozen=True)
class Job:
    """A job, before it is rendered for its target."""

    name: str
    target: str
    launch: Launch
    settings: list[Setting]
    """Megatron's, with those that we add."""
    nodes: int
    ranks: int
    """A node."""
    machine: Machine | None
    cluster: Cluster | None
    run: Path
    """Folder of the run, here."""
    out: str
    """Folder to which the job writes, on the nodes."""
    variables: dict[str, tuple[str, str]]
    """Environment of the ranks: name -> (value, why)."""
    verdicts: list[Verdict]
    """On the environment that is inherited."""
    preflight: bool = False
    command: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        """Megatron's arguments."""
        return {setting.key: setting.value for setting in self.settings}

    @property
    def workdir(self) -> str:
        """Of this project on the nodes: pods have what the Dockerfile put there."""
        return self.launch.workdir or (IN_IMAGE if self.target in KUBERNETES else str(ROOT))

    @property
    def config(self) -> str:
        """The config that the ranks read."""
        return show(self.settings, [], []).removesuffix("# as Megatron flags:\n")

    def record(self) -> dict[str, Any]:
        """What the launchers on the nodes, and `status`, need to know."""
        return {
            "name": self.name,
            "target": self.target,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks,
            "kind": self.machine.kind if self.machine else "",
            "out": self.out,
            "python": self.launch.python,
            "workdir": self.workdir,
            "script": self.launch.script,
            "environment": {name: value for name, (value, _) in self.variables.items()},
            "preflight": self.preflight,
            "master_port": self.launch.master_port,
            "restarts": self.launch.restarts,
            "grace_s": self.launch.save_before_s,
            "source": self.launch.cluster,
            "save": str(self.values.get("save", "")),
            "seq_length": self.values.get("seq_length"),
            "train_iters": self.values.get("train_iters"),
            "rate": self.launch.emulated.rate,
            "command": self.command,
            "launched": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }


def build(config: str | None, words: Sequence[str], target: str, preflight: bool = False) -> Job:
    """The job of file `config` and overrides `words`, for `target`. Raises EfaError."""
    composed = compose_all(config, words)
    mine = [setting for setting in composed if setting.group != LAUNCH]
    launch = settings.read(composed)
    if not mine:
        raise EfaError("there is nothing to launch: give --config FILE")
    name = _name(launch, config)
    place = {setting.key: setting.where for setting in composed if setting.group == LAUNCH}
    kind, cluster = _machines(launch, target, place)
    nodes = _nodes(launch, cluster)
    ranks = launch.ranks_per_node or _ranks(kind, cluster)
    if ranks < 1:
        raise EfaError(f"launch.ranks_per_node is {ranks}: a node holds 1 rank or more")
    if kind and kind.gpus is not None and ranks > kind.gpus:
        raise EfaError(
            f"launch.ranks_per_node is {ranks}, but a {kind.kind} has {kind.gpus} GPUs: correct one"
        )
    run = Path(launch.runs).absolute() / name
    out = _output(launch, target, run)
    values = {setting.key: setting.value for setting in mine}
    cpu = values.get("distributed_backend") == "gloo"
    _check(values, nodes, ranks, target, cpu)
    variables = environment.of_job(launch, values, kind, cpu)
    complete, notes = _completed(mine, values, out, cpu, target, cluster)
    # Pods inherit nothing from this shell.
    shell = {} if target in KUBERNETES else dict(os.environ)
    said = environment.inherited(shell, launch, variables, cpu)
    return Job(
        name, target, launch, complete, nodes, ranks, kind, cluster, run, out, variables, said,
        preflight=preflight, notes=notes,
        command=["--config", str(config), *words] if config else list(words),
    )  # fmt: skip


def _name(launch: Launch, config: str | None) -> str:
    name = launch.name or (Path(config).stem if config else "")
    if not name:
        raise EfaError("the run has no name: give launch.name=NAME")
    legal = name.replace("-", "").isalnum() and name.isascii() and name.lower() == name
    if not legal or not name[0].isalpha() or name[-1] == "-" or len(name) > 50:
        raise EfaError(
            f"a run cannot be called '{name}': give launch.name=NAME, of up to 50 lower-case "
            "letters, digits and inner hyphens, a letter first (Kubernetes' rule for names)"
        )
    return name


def _machines(
    launch: Launch, target: str, place: dict[str, str]
) -> tuple[Machine | None, Cluster | None]:
    """The kind of the nodes, and the cluster where it can be told before the job runs."""
    kind = machine(launch.kind) if launch.kind else None
    cluster = None
    if launch.cluster and launch.cluster.partition(":")[0] not in _LIVE:
        cluster = discover(launch.cluster, launch.kind)
        kinds = sorted({node.kind for node in cluster.nodes} - {""})
        if kind and kinds and kinds != [kind.kind]:
            raise EfaError(
                f"{place['kind']}: launch.kind is {kind.kind}, but {cluster.source} has "
                f"{', '.join(kinds)}: plan the job for these nodes, or name other ones"
            )
        if kind is None and len(kinds) == 1:
            kind = machine(kinds[0])
    if target in KUBERNETES and kind is None:
        raise EfaError(
            "launch.kind is missing: pods ask for the GPUs and EFA devices of a kind of node, "
            "give one of the catalogue (launch.kind=p5en.48xlarge)"
        )
    return kind, cluster


def _nodes(launch: Launch, cluster: Cluster | None) -> int:
    if launch.nodes < 0:
        raise EfaError(f"launch.nodes is {launch.nodes}: a job has 1 node or more")
    nodes = launch.nodes or (len(cluster.nodes) if cluster else 0)
    if not nodes:
        raise EfaError("launch.nodes is missing or 0: say how many nodes the job has")
    if cluster and len(cluster.nodes) + len(cluster.spares) < nodes:
        raise EfaError(
            f"launch.nodes is {nodes}, but {cluster.source} has {len(cluster.nodes)}: take fewer "
            "nodes, or describe all of them"
        )
    return nodes


def _ranks(kind: Machine | None, cluster: Cluster | None) -> int:
    if kind and kind.gpus:
        return kind.gpus
    if cluster:
        return cluster.nodes[0].gpus
    raise EfaError(
        "how many ranks does a node hold? give launch.kind=KIND, a key of the catalogue, or "
        "launch.ranks_per_node=N"
    )


def _output(launch: Launch, target: str, run: Path) -> str:
    if target not in KUBERNETES:
        return str(run)
    output = launch.kubernetes.output
    mounted = [claim.partition(":")[2] for claim in launch.kubernetes.claims]
    if not any(path and Path(output).is_relative_to(path) for path in mounted):
        raise EfaError(
            f"launch.kubernetes.output is '{output}', which is on none of launch.kubernetes.claims "
            f"({', '.join(launch.kubernetes.claims) or 'there are none'}): give a claim as "
            "NAME:PATH and a folder below its path, where all pods write logs and checkpoints"
        )
    return output


def _check(values: dict[str, Any], nodes: int, ranks: int, target: str, cpu: bool) -> None:
    """Raise EfaError for what would end the job in its first minute."""
    if target == "emulated" and not cpu:
        raise EfaError(
            "emulated nodes have CPUs only: add cluster=cpu (or a config with distributed_backend: "
            "gloo), and a model that fits"
        )
    try:
        Sizes.of(values).grids(nodes * ranks)
    except EfaError as error:
        raise EfaError(f"{nodes} nodes of {ranks} ranks: {error}") from error


def _completed(
    mine: list[Setting],
    values: dict[str, Any],
    out: str,
    cpu: bool,
    target: str,
    cluster: Cluster | None,
) -> tuple[list[Setting], list[str]]:
    """Megatron's settings with those added without which a restart would lose work; notes."""
    notes = []
    save = values.get("save", f"{out}/checkpoints")
    wanted: dict[str, Any] = {
        "train.save": save,
        "train.load": save,
        "train.exit_signal_handler": True,
        "train.tensorboard_dir": f"{out}/tensorboard",
    }
    if not cpu:
        wanted["train.flight_recorder_dump_path"] = f"{out}/flight-recorder"
    if cluster and target in KUBERNETES:
        # Pods find out where they are only once they run: ranks are then placed among them.
        wanted |= {"cluster.efa_cluster": f"{out}/cluster.yaml", "cluster.efa_placement": "on"}
    added = [
        Setting(*name.split("."), value, "megatron-efa launch")
        for name, value in wanted.items()
        if name.partition(".")[2] not in values
    ]
    if "save_interval" not in values:
        notes.append(
            "train.save_interval is not set: a restart begins at step 1 unless the end was "
            "announced; set it to what you can afford to lose"
        )
    if values.get("load", save) != save:
        notes.append(
            f"train.load ({values['load']}) is not train.save ({save}): a restart loads the former "
            "again; load pretrained weights by train.pretrained_checkpoint"
        )
    return mine + added, notes
