"""A cluster from Slurm: the job's nodes, and what `scontrol show topology` tells of the network.

Slurm hands out nodes sorted by name and numbers ranks in that order (topology/tree steers which
nodes a job gets, not the order of ranks in it), so the order here is SLURM_JOB_NODELIST's.
"""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from megatron.efa.cluster.discover.assemble import cluster_of
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError

_NAMES = re.compile(r"([^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*)")


def discover(kind: str = "", environment: Mapping[str, str] | None = None) -> Cluster:
    """The nodes of the Slurm job that this runs in. Raises EfaError outside one."""
    env = os.environ if environment is None else environment
    listed = env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not listed:
        raise EfaError(
            "SLURM_JOB_NODELIST is not set: run this in a Slurm job (sbatch, salloc or srun)"
        )
    names, notes = expand(listed), []
    text = _topology(notes)
    paths, blocks = topology(text)
    if text and not any(name in paths or name in blocks for name in names):
        notes.append("scontrol show topology does not mention the job's nodes")
    gpus = _gpus(env)
    nodes = [
        Node(name, gpus, paths.get(name, ()), kind=kind, domain=blocks.get(name, ""))
        for name in names
    ]
    return cluster_of(nodes, f"Slurm job {env.get('SLURM_JOB_ID', '?')}", notes)


def _topology(notes: list[str]) -> str:
    """What `scontrol show topology` prints; a note if it prints none."""
    try:
        answer = subprocess.run(
            ["scontrol", "show", "topology"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        notes.append(f"scontrol show topology could not be run ({error}): paths not known")
        return ""
    if answer.returncode or not answer.stdout.strip():
        reason = (answer.stderr.strip().splitlines() or ["no topology is configured"])[0]
        notes.append(f"scontrol show topology told nothing ({reason}): paths not known")
        return ""
    return answer.stdout


def topology(text: str) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """(switches above each node, root first; block of each node) of scontrol's records.

    A tree has lines `SwitchName=s Level=1 LinkSpeed=1 Switches=a,b` above `... Nodes=n[1-4]` at
    Level=0; each level repeats all nodes below it. Blocks are `BlockName=b BlockIndex=0 Nodes=...`.
    """
    switches: list[tuple[int, str, list[str]]] = []
    blocks: dict[str, str] = {}
    for line in text.splitlines():
        said = dict(word.split("=", 1) for word in line.split() if "=" in word)
        nodes = expand(said.get("Nodes", ""))
        if "SwitchName" in said:
            level = said.get("Level", "0")
            switches.append((int(level) if level.isdecimal() else 0, said["SwitchName"], nodes))
        elif "BlockName" in said:
            blocks |= dict.fromkeys(nodes, said["BlockName"])
    paths: dict[str, tuple[str, ...]] = {}
    for _, name, nodes in sorted(switches, key=lambda switch: -switch[0]):
        for node in nodes:
            paths[node] = (*paths.get(node, ()), name)
    return paths, blocks


def expand(listed: str) -> list[str]:
    """Names of a Slurm host list, as in "gpu[01-03,7]-a,login": with their leading zeros."""
    return [name for part in _NAMES.findall(listed) for name in _expanded(part.strip()) if name]


def _expanded(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part] if part not in ("(null)", "None") else []
    inside, _, tail = rest.partition("]")
    made = []
    for piece in inside.split(","):
        first, _, last = piece.partition("-")
        numbers: Sequence[str] = [first]
        if last:
            numbers = [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
        made += [head + number + end for number in numbers for end in _expanded(tail) or [""]]
    return made


def _gpus(env: Mapping[str, str]) -> int:
    """Ranks a node: GPUs, or tasks, a node; 0 where Slurm tells neither."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        number = env.get(name, "").rpartition(":")[2]
        if number.isdecimal() and int(number):
            return int(number)
    return 0
