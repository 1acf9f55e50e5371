"""`Context`: what the job is going to be: kind of node, how many, its config and its sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.efa.cluster.catalogue import Machine, kinds, machine
from megatron.efa.cluster.model import Cluster
from megatron.efa.config.words import LAUNCH
from megatron.efa.doctor.registry import Skip
from megatron.efa.errors import EfaError

if TYPE_CHECKING:
    from megatron.efa.doctor.host import Host


@dataclass(frozen=True)
class Context:
    """All that the command line and the config tell; nothing of it is asked of the machine."""

    kind: str = ""
    """Key of the catalogue, as the job wants its nodes; empty if not told."""
    nodes: int | None = None
    cluster: Cluster | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The config's keys."""
    checkpoint_bytes: float | None = None
    logs: tuple[Path, ...] = ()
    """NCCL_DEBUG=INFO output of this job or of an earlier one."""

    def get(self, key: str, default: Any = None) -> Any:
        """A key of the config."""
        return self.settings.get(key, default)


def read(
    config: str | None,
    overrides: Sequence[str] = (),
    *,
    kind: str = "",
    nodes: int | None = None,
    cluster: Cluster | None = None,
    logs: Sequence[Path] = (),
) -> Context:
    """The context of a job. Raises EfaError.

    Explicit values count before the config's (its `launch` group), those before the cluster's.
    """
    settings: dict[str, Any] = {}
    size = None
    if config is not None or overrides:
        from megatron.efa.config.compose import compose_all

        whole = compose_all(config, overrides)
        settings = {each.key: each.value for each in whole if each.group != LAUNCH}
        launch = {each.key: each.value for each in whole if each.group == LAUNCH}
        kind = kind or str(launch.get("kind", ""))
        nodes = nodes or launch.get("nodes") or None
        size = checkpoint_bytes(Path(config), settings, overrides) if config else None
    kind = kind.removeprefix("ml.")  # SageMaker's spelling
    if kind:
        machine(kind)  # a kind that does not exist is a slip of the pen, said at once
    if cluster is not None:
        told = {node.kind for node in cluster.nodes}
        kind = kind or (told.pop() if len(told) == 1 else "")
        nodes = nodes or len(cluster.nodes)
    return Context(kind, nodes, cluster, settings, size, tuple(logs))


def checkpoint_bytes(
    config: Path, settings: Mapping[str, Any], overrides: Sequence[str] = ()
) -> float | None:
    """Bytes of one checkpoint of the model that `config` describes; None where it has no model.

    Weights, and unless `no_save_optim` the optimizer's master weights and moments: what the
    planner's `States` holds of each parameter, less its gradient, which is not saved.
    """
    from megatron.efa.planner.from_config import shape_of
    from megatron.efa.planner.memory import States

    try:
        shape = shape_of(config, overrides)
    except EfaError:
        return None
    kept = States()
    each = kept.weight
    if not settings.get("no_save_optim"):
        each += kept.master + kept.moments
    return shape.params(mtp=True) * each


def expected(host: "Host", context: Context) -> Machine:
    """The machine that `host` is by its firmware, else the one that the job wants.

    Raises Skip where nobody says, or where it is a machine without EFA.
    """
    kind = host.kind or context.kind
    if not kind:
        raise Skip("neither the firmware nor --kind says what kind of machine this is")
    if kind not in kinds():
        raise Skip(f"the catalogue has no {kind}: add it to megatron/efa/cluster/catalogue.yaml")
    found = machine(kind)
    if found.fabric != "efa":
        raise Skip(f"a {kind} has no EFA")
    return found


def wants_efa(host: "Host", context: Context) -> None:
    """Raise Skip unless this machine has EFA, or should have."""
    if not devices(host):
        expected(host, context)


def devices(host: "Host") -> list[str]:
    """Names of the EFA devices: those whose driver is efa (an mlx5 device is none)."""
    base = "/sys/class/infiniband"
    return [name for name in host.names(base) if driver(host, f"{base}/{name}") == "efa"]


def driver(host: "Host", device: str) -> str:
    """Name of the kernel driver of a device in sysfs; empty if it has none."""
    link = f"{device}/device/driver"
    return host.real(link).rpartition("/")[2] if host.exists(link) else ""
