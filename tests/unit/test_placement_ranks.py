"""Processes that a launcher has numbered agree on other ranks, and start torch.distributed so."""

import json
import os
import socket
import traceback
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist

from megatron.efa.cluster import current, ranks
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.cluster.traffic import Sizes
from megatron.efa.emulate.job import free_port
from megatron.efa.errors import EfaError

SIZES = {
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "num_experts": 8,
    "global_batch_size": 4096,
}
# EP groups of two hosts with two ranks each: a belongs to d, b to c.
HOSTS = Cluster(
    tuple(Node(name, 2, (switch,)) for name, switch in zip("abcd", "xyyx", strict=True)),
    source="hosts.yaml",
)


def tell(hosts="abcd", per_node=2, cluster=HOSTS):
    digest = ranks.digest_of(cluster)
    return [
        {"names": [name], "local_rank": local, "cluster": digest}
        for name in hosts
        for local in range(per_node)
    ]


def train(rank, world, port, cluster, out, **flags):
    """What a process does from its launcher on: be placed, start torch, say where it is."""
    torch.set_num_threads(1)
    host = "abcd"[rank // 2]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["MEGATRON_EFA_HOST"] = host
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    current.use(cluster)
    args = Namespace(rank=rank, world_size=world, distributed_timeout_minutes=1, **SIZES, **flags)
    try:
        ranks.configure(args)
    except EfaError as error:
        out.write_text(json.dumps({"error": str(error)}))
        return
    dist.init_process_group("gloo", rank=args.rank, world_size=world)
    # A rank that came to the wrong place would not get its own launcher's number back.
    seen = [None] * world
    dist.all_gather_object(seen, (rank, host))
    placed = [node.name for node in current.current().nodes]
    out.write_text(
        json.dumps({"rank": args.rank, "env": os.environ["RANK"], "seen": seen, "placed": placed})
    )
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def job(tmp_path):
    """Fork eight processes through `train`; returns what each wrote."""

    def job(cluster=HOSTS, **flags):
        port, pids = free_port(), []
        for rank in range(8):
            pid = os.fork()
            if pid == 0:
                try:
                    train(rank, 8, port, cluster, tmp_path / f"{rank}", **flags)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert not any(codes)
        return [json.loads((tmp_path / f"{rank}").read_text()) for rank in range(8)]

    return job


def test_processes_take_the_ranks_of_their_host_place_without_torchruns_store(job):
    found = job(efa_placement="on")
    placed = found[0]["placed"]
    assert {frozenset(placed[:2]), frozenset(placed[2:])} == {frozenset("ad"), frozenset("bc")}
    for process, said in enumerate(found):
        host = "abcd"[process // 2]
        assert said["rank"] == int(said["env"]) == 2 * placed.index(host) + process % 2
        assert said["placed"] == placed
        assert said["seen"][said["rank"]] == [process, host]
        assert [name for _, name in said["seen"]] == [name for name in placed for _ in range(2)]


def test_a_wrong_description_ends_every_process_with_the_same_sentence(job):
    found = job(Cluster(HOSTS.nodes[:3], source="hosts.yaml"), efa_placement="on")
    assert all("host d is not in the description" in said["error"] for said in found)
    assert len({said["error"] for said in found}) == 1


def test_off_touches_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    for flags in ({}, {"efa_placement": "off"}):
        args = Namespace(rank=3, world_size=8, **flags)
        before = dict(os.environ), vars(args).copy(), current.current()
        ranks.configure(args)
        assert (dict(os.environ), vars(args), current.current()) == before


def test_ranks_stay_where_nothing_is_known_of_the_network():
    unknown = current.of_torchrun(8, 2)
    answer = ranks.decide(tell(cluster=unknown), unknown, Sizes.of(SIZES))
    assert answer["hosts"] is None
    assert "nothing is known of the network" in answer["summary"]


def test_hosts_are_found_by_short_names_and_among_spares():
    whole = Cluster((Node("a.x.y", 8, ("x",)), Node("b.x.y", 8, ("y",))), (Node("c", 8, ("x",)),))
    answer = ranks.decide(tell(["a", "c.z"], 8, whole), whole, Sizes())
    assert answer["came"] == ["a.x.y", "c"]
    assert answer["gpus"] == [8, 8]


MISTAKES = {
    "strange": (tell("abce"), "host e is not in the description of the cluster (hosts.yaml; it"),
    "cyclic": (sorted(tell(), key=lambda t: t["local_rank"]), "number ranks host by host"),
    "twice": (tell("abca"), "say that they are host a: start one torchrun a host"),
    "another": (
        [*tell()[:7], {"names": ["d"], "local_rank": 1, "cluster": "0"}],
        "rank 7 on d has another description of the cluster than rank 0",
    ),
}


@pytest.mark.parametrize(("told", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_what_ranks_tell_is_checked(told, sentence):
    with pytest.raises(EfaError) as error:
        ranks.decide(told, HOSTS, Sizes.of(SIZES))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", ["inprocess_restart", "fake_process_group"])
def test_refuses_what_takes_ranks_from_the_launcher(flag):
    args = Namespace(rank=0, world_size=8, efa_placement="on", **{flag: True})
    with pytest.raises(EfaError, match=f"does not go with --{flag.replace('_', '-')}"):
        ranks.configure(args)


def test_what_a_host_may_be_called(monkeypatch):
    monkeypatch.setenv("MEGATRON_EFA_HOST", "node-7")
    monkeypatch.setenv("SLURMD_NODENAME", "p5-7")
    assert current.names_of_host() == ["node-7", "p5-7", socket.gethostname()]
