"""Nodes and ranks get the environment that leaves them the emulated links and nothing else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.efa.emulate import placement
from megatron.efa.errors import EfaError


def node_env(base=(), gpus=None, hostname="node0"):
    return placement.of_node(
        dict(base), hostname, "eth0", "demo", gpus, Path("/state/cluster.yaml")
    )


def test_every_library_is_bound_to_the_nodes_link():
    env = node_env({"GLOO_SOCKET_IFNAME": "ens5"})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        assert env[name] == "eth0"


def test_threads_are_one_unless_given():
    assert node_env()["OMP_NUM_THREADS"] == "1"
    assert node_env({"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_ranks_of_another_launcher_are_forgotten_and_the_rest_is_kept():
    base = {
        "RANK": "7",
        "MASTER_ADDR": "h",
        "SLURM_PROCID": "3",
        "PET_NNODES": "9",
        "HF_HOME": "/x",
        "PATH": "/bin",
    }
    env = node_env(base)
    assert not {"RANK", "MASTER_ADDR", "SLURM_PROCID", "PET_NNODES"} & env.keys()
    assert (env["HF_HOME"], env["PATH"]) == ("/x", "/bin")


def test_nodes_compile_into_folders_of_their_own():
    """Their processes have the same numbers, by which compilers name the files they write."""
    first, second = (node_env(gpus=["0"], hostname=name) for name in ("node0", "node1"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert first[name] != second[name]


def test_without_gpu_no_gpu_is_visible_and_nccl_is_left_alone():
    env = node_env({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "NCCL_NET" not in env


def test_nccl_takes_plain_sockets_and_nodes_for_machines():
    env = node_env({"NCCL_NET": "AWS Libfabric"}, gpus=["0", "1"])
    assert (env["NCCL_NET"], env["NCCL_IB_DISABLE"], env["NCCL_MNNVL_ENABLE"]) == (
        "Socket",
        "1",
        "0",
    )
    assert env["NCCL_HOSTID"] != node_env(gpus=["2", "3"], hostname="node1")["NCCL_HOSTID"]


def test_a_rank_with_a_gpu_of_its_own_finds_it_by_local_rank():
    node = node_env(gpus=["2", "3"])
    rank = placement.of_rank({**node, "LOCAL_RANK": "1"}, rank=3, local_rank=1)
    assert (rank["CUDA_VISIBLE_DEVICES"], rank["LOCAL_RANK"]) == ("2,3", "1")
    assert rank["NCCL_HOSTID"] == node["NCCL_HOSTID"]


def test_ranks_that_share_a_gpu_each_see_it_as_their_only_one_and_are_hosts_to_nccl():
    node = node_env(gpus=["5", "5"])
    ranks = [
        placement.of_rank({**node, "LOCAL_RANK": str(local)}, rank=2 + local, local_rank=local)
        for local in (0, 1)
    ]
    for rank in ranks:
        assert (rank["CUDA_VISIBLE_DEVICES"], rank["LOCAL_RANK"]) == ("5", "0")
    assert ranks[0]["NCCL_HOSTID"] != ranks[1]["NCCL_HOSTID"]


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 8))
def test_gpus_are_shared_evenly_and_not_at_all_if_there_are_enough(gpus, nodes, ranks_per_node):
    names = [f"GPU-{index}" for index in range(gpus)]
    shared = placement.share(names, nodes, ranks_per_node)
    assert [len(node) for node in shared] == [ranks_per_node] * nodes
    flat = [gpu for node in shared for gpu in node]
    loads = [flat.count(name) for name in names]
    if gpus >= nodes * ranks_per_node:
        assert max(loads) == 1
    else:
        assert max(loads) - min(loads) <= 1
    assert flat == sorted(flat, key=names.index)  # a node's ranks stay together


def test_gpus_named_in_the_environment_are_the_ones_shared(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-ab")
    assert placement.visible_gpus() == ["3", "GPU-ab"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(EfaError, match="--gpu"):
        placement.visible_gpus()
