"""A job for Slurm: ParallelCluster, PCS or HyperPod; in containers by pyxis and enroot, or bare."""

import re
import shlex

from megatron.efa.errors import EfaError
from megatron.efa.launch.job import Job
from megatron.efa.launch.script import header, loop
from megatron.efa.launch.settings import Slurm

_TIME = re.compile(r"\d+(-\d+(:\d+(:\d+)?)?|:\d+(:\d+)?)?")  # as sbatch's manual page has it
_WORDS = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "gres")


def render(job: Job) -> dict[str, str]:
    """The script for sbatch. Raises EfaError for an option that sbatch would refuse."""
    lines = ["#!/bin/bash", *_options(job), *header(job, job.launch.python), *_container(job)]
    lines += [*_resume(job.launch.slurm), *_STEP, *_requeue(job.launch.slurm), "", loop()]
    return {"job.sbatch": "\n".join(lines)}


def _options(job: Job) -> list[str]:
    slurm, launch = job.launch.slurm, job.launch
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        "--exclusive=topo" if slurm.exclusive_topology else "--exclusive",
        "--wait-all-nodes=1",
        "--open-mode=append",
        "--requeue" if slurm.requeue else "--no-requeue",
        f"--output={job.run}/slurm-%j.log",
        *(f"--{word}={getattr(slurm, word)}" for word in _WORDS if getattr(slurm, word)),
    ]
    if slurm.segment:
        if job.nodes % slurm.segment:
            raise EfaError(
                f"launch.slurm.segment is {slurm.segment}, which does not divide {job.nodes} "
                "nodes: Slurm places whole segments"
            )
        options.append(f"--segment={slurm.segment}")
    if slurm.switches:
        options.append(f"--switches={slurm.switches}")
    if launch.time:
        if not _TIME.fullmatch(launch.time):
            raise EfaError(f"launch.time is '{launch.time}': write D-HH:MM:SS or minutes")
        # To the script alone (B:), which tells the launchers; torchrun would end its ranks at once.
        options += [f"--time={launch.time}", f"--signal=B:USR1@{launch.save_before_s}"]
    for option in slurm.options:
        if not option.startswith("-") or "\n" in option:
            raise EfaError(f"launch.slurm.options has '{option}': write them as --name=value")
    return [f"#SBATCH {option}" for option in (*options, *slurm.options)]


def _container(job: Job) -> list[str]:
    """The array `container`, of pyxis' options of srun; empty without a container."""
    image = job.launch.image
    if not image:
        return ["container=()"]
    mounts = dict.fromkeys((f"{job.workdir}:{job.workdir}", f"{job.run}:{job.run}"))
    options = [
        f"--container-image={image}",
        f"--container-mounts={','.join([*job.launch.mounts, *mounts])}",
        f"--container-workdir={job.workdir}",
        "--no-container-mount-home",
    ]
    lines = [f"container=({' '.join(map(shlex.quote, options))})"]
    if image.startswith(("/", ".")):
        quoted = shlex.quote(image)
        lines += [
            f"if [ ! -e {quoted} ]; then",
            f'    echo "megatron-efa: there is no container image "{quoted}": import it first" >&2',
            "    exit 2",
            "fi",
        ]
    return lines


def _resume(slurm: Slurm) -> list[str]:
    """The array `resume`: HyperPod replaces a broken node and starts the step again."""
    on, off = ["resume=(--auto-resume=1)"], ["resume=()"]
    if slurm.auto_resume not in ("on", "off", "detect"):
        raise EfaError(
            f"launch.slurm.auto_resume is '{slurm.auto_resume}', but must be on, off or detect"
        )
    detect = ["if [ -d /opt/sagemaker_cluster ]; then", f"    {on[0]}", "else", f"    {off[0]}"]
    return {"on": on, "off": off, "detect": [*detect, "fi"]}[slurm.auto_resume]


_STEP = [
    "",
    "step() {",
    '    srun --nodes=1 --ntasks=1 "${container[@]}" \\',
    '        "$python" -m megatron.efa.launch.hosts "$run" "$1" || return',
    "    # A node that is lost ends the step: the launchers end by themselves when a rank fails.",
    '    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --wait=120 \\',
    '        "${resume[@]}" "${container[@]}" \\',
    '        "$python" -m megatron.efa.launch.node "$run" --attempt "$1"',
    "}",
]


def _requeue(slurm: Slurm) -> list[str]:
    if not slurm.requeue:
        return ["requeue() { return 1; }"]
    return ['requeue() { scontrol requeue "$SLURM_JOB_ID"; }']
