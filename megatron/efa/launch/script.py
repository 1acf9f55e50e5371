"""What the shell scripts of all targets share."""

import shlex
from pathlib import Path

from megatron.efa.launch.job import Job

_LOOP = Path(__file__).with_name("loop.sh")


def header(job: Job, python: str) -> list[str]:
    """Lines that say where and how often."""
    return [
        f"# {job.name}: {job.nodes} nodes of {job.ranks} ranks, by megatron-efa launch.",
        "set -u -o pipefail",
        f"run={shlex.quote(str(job.run))}",
        f"python={shlex.quote(python)}",
        f"nodes={job.nodes}",
        f"restarts={job.launch.restarts}",
        f"cd {shlex.quote(job.workdir)} || exit 2",
        "",
    ]


def loop() -> str:
    """The loop over attempts, which needs `header`, `step` and `requeue`."""
    return _LOOP.read_text()
