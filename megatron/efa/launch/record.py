"""A run's folder: what was launched, and what the nodes wrote of it.

run.json, config.yaml, environment, cluster.yaml    what was launched
job.sbatch | job.yaml | torchrun.sh | job.sh        as rendered
attempts/K/hosts, cluster.yaml                      hosts in rank order
attempts/K/node-R/...                               torchrun's logs, a folder a rank
attempts/K/failed-code-C-rank-R-on-HOST             what failed
state                                               running, done, failed, stopped, requeued
checkpoints/, tensorboard/, flight-recorder/        unless the config says otherwise
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.efa import aside
from megatron.efa.cluster import describe
from megatron.efa.errors import EfaError
from megatron.efa.launch.job import Job

RECORD = "run.json"


def files(job: Job, rendered: Mapping[str, str]) -> dict[str, str]:
    """Name -> text of all that a run's folder starts with."""
    variables = "".join(f"{k}={v}  # {why}\n" for k, (v, why) in job.variables.items())
    texts = {
        RECORD: json.dumps(job.record(), indent=1) + "\n",
        "config.yaml": job.config,
        "environment": variables,
    }
    if job.cluster is not None:
        texts["cluster.yaml"] = describe.text_of(job.cluster)
    return texts | dict(rendered)


def write(run: Path, texts: Mapping[str, str], again: bool = False) -> None:
    """Make the run's folder, whole or not at all; `again` renders into one that is there.

    Raises EfaError if a run of that name is there and `again` is not given, or is not there.
    """
    known = (run / RECORD).is_file()
    if run.exists() and not (again and known):
        what = f"a run launched at {read(run)['launched']}" if known else "something else"
        advice = "add --again to go on with it, or " if known else ""
        raise EfaError(f"{run} holds {what}: {advice}give another launch.name=NAME")
    if again and not known:
        raise EfaError(f"--again: there is no run in {run}: leave --again out")
    try:
        with aside.beside(run) as made:
            for name, text in texts.items():
                (made / name).write_text(text)
            if not known:
                os.replace(made, run)
                return
            for name in texts:
                os.replace(made / name, run / name)
    except OSError as error:
        raise EfaError(f"the run's folder {run} cannot be written: {error.strerror}") from error


def read(run: Path) -> dict[str, Any]:
    """What was launched in folder `run`. Raises EfaError."""
    try:
        return json.loads((run / RECORD).read_text())
    except FileNotFoundError:
        raise EfaError(
            f"there is no run in {run} (no {RECORD}): give the folder that `megatron-efa launch` "
            "named, or the name of a run in runs/launch"
        ) from None
    except (OSError, ValueError) as error:
        raise EfaError(f"{run / RECORD} cannot be read: {error}") from error
