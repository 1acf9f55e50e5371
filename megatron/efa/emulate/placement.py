"""The environment of nodes and ranks: which interface leads to the others, which GPU is whose."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.efa.errors import EfaError

_SHARED_GPUS = "MEGATRON_EFA_SHARED_GPUS"
"""Comma-separated GPU of each local rank of a node; set where ranks share GPUs."""

# What another launcher left in the environment would name other ranks, nodes and interfaces.
_FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
            "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_FOREIGN_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "PET_")


def of_node(
    base: Mapping[str, str],
    hostname: str,
    interface: str,
    cluster_name: str,
    gpus: Sequence[str] | None,
    description: Path,
) -> dict[str, str]:
    """Environment of torchrun on one node.

    `description` is the file that tells its ranks of the cluster.

    `gpus` lists the GPU of each of its local ranks (None: no GPUs, and none are visible). Sockets
    are bound to `interface`; NCCL takes plain sockets over it, since no other fabric leads through
    the emulated links, and takes nodes for different machines.
    """
    env = {
        name: value
        for name, value in base.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    env["MEGATRON_EFA_CLUSTER"] = str(description)
    env["MEGATRON_EFA_HOST"] = hostname  # also where nodes are no namespaces
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        env[name] = interface
    if gpus is None:
        env["CUDA_VISIBLE_DEVICES"] = ""
        return env
    env.update(
        NCCL_NET="Socket",
        NCCL_IB_DISABLE="1",
        NCCL_MNNVL_ENABLE="0",  # NVLink must not join what are two nodes here
        NCCL_HOSTID=f"{cluster_name}-{hostname}",
        # Compilers name what they are writing by process, and nodes number processes alike.
        TORCHINDUCTOR_CACHE_DIR=str(description.parent / "compiled" / hostname / "inductor"),
        TRITON_CACHE_DIR=str(description.parent / "compiled" / hostname / "triton"),
    )
    env.setdefault("NCCL_NVLS_ENABLE", "0")
    env.pop("NCCL_COMM_ID", None)
    if len(set(gpus)) == len(gpus):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:
        env[_SHARED_GPUS] = ",".join(gpus)
    return env


def of_rank(node: Mapping[str, str], rank: int, local_rank: int) -> dict[str, str]:
    """Environment of one rank, from what torchrun gave it.

    Where ranks share GPUs, Megatron's `set_device(LOCAL_RANK)` would name GPUs that are not there:
    each rank sees its one GPU as device 0 and LOCAL_RANK is 0 (its index on the node is RANK modulo
    LOCAL_WORLD_SIZE). NCCL refuses two ranks of one host on one GPU, so each rank is a host to
    NCCL.
    """
    env = dict(node)
    if shared := env.pop(_SHARED_GPUS, None):
        env["CUDA_VISIBLE_DEVICES"] = shared.split(",")[local_rank]
        env["LOCAL_RANK"] = "0"
        env["NCCL_HOSTID"] = f"{env['NCCL_HOSTID']}-rank{rank}"
    return env


def share(gpus: Sequence[str], nodes: int, ranks_per_node: int) -> list[list[str]]:
    """GPU of each local rank of each node: one each if there are enough, else neighbours share."""
    world = nodes * ranks_per_node
    index = [rank if len(gpus) >= world else rank * len(gpus) // world for rank in range(world)]
    return [
        [gpus[index[node * ranks_per_node + local]] for local in range(ranks_per_node)]
        for node in range(nodes)
    ]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; EfaError if none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        gpus = [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    else:
        code = "import torch; print(torch.cuda.device_count())"
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        count = int(answer.stdout) if answer.returncode == 0 else 0
        gpus = [str(index) for index in range(count)]
    if not gpus:
        raise EfaError("--gpu was given, but PyTorch sees no GPU here: leave it out to run on CPUs")
    return gpus
