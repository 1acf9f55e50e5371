"""Where a description of a cluster comes from: one module a source, each gives a `Cluster`.

    torchrun   what its variables say (cluster.current)      slurm        scontrol, SLURM_*
    ec2        the EC2 API, through boto3                    kubernetes   node labels
    hostfile   mpirun's                                      FILE.yaml    a description

Asked once, by whoever launches the job, into a file that every rank reads: a thousand ranks that
ask an API are throttled, and may get different answers.
"""

from collections.abc import Callable
from pathlib import Path

from megatron.efa.cluster import current, describe
from megatron.efa.cluster.model import Cluster
from megatron.efa.errors import EfaError

FORMS = "ec2[:ID,ID,...], slurm, kubernetes[:FILE.json], hostfile:FILE, torchrun, or FILE.yaml"


def discover(source: str | None, kind: str = "") -> Cluster:
    """The cluster that `source` (one of `FORMS`; None: the job's own) tells.

    `kind`, a key of the catalogue, is for sources that do not tell it. Raises EfaError.
    """
    if source is None:
        return current.current()
    name, _, rest = source.partition(":")
    if name in _SOURCES:
        return _SOURCES[name](rest, kind)
    if Path(source).suffix in (".yaml", ".yml"):
        return describe.read(source)
    raise EfaError(f"--from {source}: there is no such source; give {FORMS}")


def _ec2(ids: str, kind: str) -> Cluster:
    from megatron.efa.cluster.discover import ec2

    return ec2.discover(ids.split(",") if ids else None)


def _slurm(_: str, kind: str) -> Cluster:
    from megatron.efa.cluster.discover import slurm

    return slurm.discover(kind)


def _kubernetes(file: str, kind: str) -> Cluster:
    from megatron.efa.cluster.discover import kubernetes

    return kubernetes.discover(Path(file) if file else None)


def _hostfile(file: str, kind: str) -> Cluster:
    from megatron.efa.cluster.discover import hostfile

    if not file:
        raise EfaError("--from hostfile: name the file, as in --from hostfile:hosts.txt")
    return hostfile.discover(Path(file), kind)


def _torchrun(_: str, kind: str) -> Cluster:
    import os

    return current.of_torchrun(
        int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    )


_SOURCES: dict[str, Callable[[str, str], Cluster]] = {
    "ec2": _ec2,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "hostfile": _hostfile,
    "torchrun": _torchrun,
}
