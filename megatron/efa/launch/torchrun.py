"""Lines for any other scheduler: one torchrun a node."""

import shlex

from megatron.efa.launch.job import Job


def render(job: Job) -> dict[str, str]:
    """The script that is to be started once on each node, with the node's rank."""
    ranks, port = job.ranks, job.launch.master_port
    exports = [f"export {k}={shlex.quote(v)}  # {why}" for k, (v, why) in job.variables.items()]
    described = f"{job.run}/cluster.yaml"
    if job.cluster is not None:
        exports.append(f"export MEGATRON_EFA_CLUSTER={shlex.quote(described)}")
    lines = [
        "#!/bin/bash",
        f"# {job.name}: start on each of {job.nodes} nodes, as",
        "#   torchrun.sh NODE_RANK HEAD",
        f"# NODE_RANK from 0 to {job.nodes - 1} (ranks follow the order of hosts), HEAD the host of 0.",
        "set -u",
        f"cd {shlex.quote(job.workdir)} || exit 2",
        *exports,
        *_preflight(job),
        f"exec {shlex.quote(job.launch.python)} -m torch.distributed.run \\",
        f'    --nnodes={job.nodes} --nproc-per-node={ranks} --node-rank="$1" \\',
        f'    --master-addr="$2" --master-port={port} --max-restarts=0 \\',
        f'    --log-dir={shlex.quote(str(job.run))}/attempts/1/node-"$1" --redirects=3 --tee=3 \\',
        f"    {shlex.quote(job.launch.script)} --config {shlex.quote(str(job.run))}/config.yaml",
        "",
    ]
    return {"torchrun.sh": "\n".join(lines)}


def _preflight(job: Job) -> list[str]:
    if not job.preflight:
        return []
    kind = f"--kind {job.machine.kind} " if job.machine else ""
    return [
        f"{shlex.quote(job.launch.python)} -m megatron.efa doctor {kind}--nodes {job.nodes} \\",
        f"    --config {shlex.quote(str(job.run))}/config.yaml",
        "code=$?",
        "[ $code -le 1 ] || exit $code  # 1: warnings",
    ]
