"""Placement where a launcher has already fixed the processes: RANK is permuted before torch starts.

No rank can know by itself on which host the others are. So each tells its host's name through the
job's rendezvous store; rank 0 finds the hosts in the description of the cluster, places them, and
writes down one answer, which every rank reads: all agree, since there is nothing else to read.
LOCAL_RANK and the address of the store stay as they are; a node's ranks move together.
"""

import hashlib
import json
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from megatron.efa.cluster import current
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.cluster.place import place
from megatron.efa.cluster.traffic import Sizes
from megatron.efa.errors import EfaError

_GRACE_S = 30
"""How much longer ranks wait for rank 0's answer than it waits for theirs."""

_kept: list[Any] = []  # the store that this process serves to the job until it ends


def configure(args: Namespace) -> None:
    """With `--efa-placement on` give this process the rank that placement has for it.

    Sets RANK, `args.rank`, and the cluster of `current()` to hosts in their new order. To be called
    on every rank before `torch.distributed` is initialised. Raises EfaError, on every rank the
    same, if ranks and the description of the cluster do not fit.
    """
    if getattr(args, "efa_placement", "off") == "off" or args.world_size == 1:
        return
    for name in ("inprocess_restart", "fake_process_group"):
        if getattr(args, name, False):
            raise EfaError(
                f"--efa-placement on does not go with --{name.replace('_', '-')}, which takes "
                "ranks as the launcher gave them: leave one of the two out"
            )
    rank = int(os.environ["RANK"])
    answer = _exchange(rank, args, Sizes.of(_as_run(args)))
    if "error" in answer:
        raise EfaError(answer["error"])
    if rank == 0:
        print(answer["summary"], flush=True)
    if answer["hosts"] is None:
        return
    cluster = _of_job(current.current(), answer["hosts"], answer["gpus"])
    old = _of_job(current.current(), answer["came"], answer["gpus"]).node_of(rank)
    new = cluster.ranks_of(answer["places"][old])[int(os.environ["LOCAL_RANK"])]
    os.environ["RANK"] = str(new)
    args.rank = new
    current.use(cluster)


def decide(told: Sequence[dict[str, Any]], cluster: Cluster, sizes: Sizes) -> dict[str, Any]:
    """Return rank 0's answer to what each rank `told` (`names`, `local_rank`, `cluster`: digest).

    `hosts`: names in their new order, None if ranks stay; `came`: as they came; `gpus`: ranks of
    each; `places`: index in `hosts` of each host as it came. Raises EfaError.
    """
    hosts = _runs(told)
    if not any(node.path or node.domain for node in cluster.nodes):
        known = cluster.source or "the description"
        note = f"nothing is known of the network between hosts (from {known}), ranks stay"
        return {"hosts": None, "summary": f"placement: {note}"}
    digest = digest_of(cluster)
    for rank, tale in enumerate(told):
        if tale["cluster"] != digest:
            raise EfaError(
                f"rank {rank} on {tale['names'][-1]} has another description of the cluster than "
                "rank 0: give every node the same file"
            )
    came = [_find(cluster, names) for names, _ in hosts]
    if len(set(came)) < len(came):
        twice = next(name for name in came if came.count(name) > 1)
        raise EfaError(
            f"two groups of ranks say that they are host {twice}: start one torchrun a host, or "
            "set MEGATRON_EFA_HOST to a name of its own in each"
        )
    gpus = [count for _, count in hosts]
    placement = place(_of_job(cluster, came, gpus), sizes)
    ordered = [node.name for node in placement.after.nodes]
    places = {name: index for index, name in enumerate(ordered)}
    return {
        "hosts": ordered,
        "came": came,
        "gpus": gpus,
        "places": [places[name] for name in came],
        "summary": placement.summary(),
    }


def digest_of(cluster: Cluster) -> str:
    """A digest of hosts and network, equal on ranks that read the same description.

    The order of hosts does not count: where each host stands is what is being asked.
    """
    lines = sorted(f"{n.name} {n.path} {n.domain}" for n in (*cluster.nodes, *cluster.spares))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _as_run(args: Namespace) -> dict[str, Any]:
    """Megatron's arguments after validation, in which virtual stages have another name."""
    virtual = getattr(args, "virtual_pipeline_model_parallel_size", None)
    return vars(args) | {"num_virtual_stages_per_pipeline_rank": virtual}


def _runs(told: Sequence[dict[str, Any]]) -> list[tuple[list[str], int]]:
    """Names and number of ranks of each host, which must hold one run of ranks in local order."""
    hosts: list[tuple[list[str], int]] = []
    for rank, tale in enumerate(told):
        names, local = tale["names"], tale["local_rank"]
        if local == 0:
            hosts.append((names, 1))
        elif hosts and hosts[-1] == (names, local):
            hosts[-1] = (names, local + 1)
        else:
            raise EfaError(
                f"rank {rank} is local rank {local} of {names[-1]}, but does not follow local rank "
                f"{local - 1} of it: let the launcher number ranks host by host (in Slurm, "
                "--distribution=block)"
            )
    return hosts


def _find(cluster: Cluster, names: Sequence[str]) -> str:
    nodes = (*cluster.nodes, *cluster.spares)
    for name in names:
        for same in (
            [node.name for node in nodes if node.name == name],
            [node.name for node in nodes if node.name.split(".")[0] == name.split(".")[0]],
        ):
            if len(same) == 1:
                return same[0]
    raise EfaError(
        f"host {names[0]} is not in the description of the cluster "
        f"({cluster.source or 'no source'}; it has {nodes[0].name}, ...): describe the hosts that "
        "the job runs on, or set MEGATRON_EFA_HOST to the host's name in it"
    )


def _of_job(cluster: Cluster, hosts: Sequence[str], gpus: Sequence[int]) -> Cluster:
    """The nodes named `hosts`, in that order, with as many ranks as run on them."""
    every: dict[str, Node] = {n.name: n for n in (*cluster.nodes, *cluster.spares)}
    nodes = tuple(replace(every[h], gpus=g) for h, g in zip(hosts, gpus, strict=True))
    spares = tuple(node for name, node in every.items() if name not in hosts)
    return replace(cluster, nodes=nodes, spares=spares)


def _exchange(rank: int, args: Namespace, sizes: Sizes) -> dict[str, Any]:
    import torch.distributed as dist

    wait = timedelta(minutes=args.distributed_timeout_minutes)
    try:
        store = _store(rank, args.world_size, wait)
        # Torchrun's restarts share a store, and must not read the answer of the start before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"efa/placement/{attempt}", store)
        mine = {
            "names": current.names_of_host(),
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "cluster": digest_of(current.current()),
        }
        store.set(f"rank{rank}", json.dumps(mine))
        if rank == 0:
            store.set("answer", json.dumps(_answer(store, args.world_size, sizes, wait)))
        store.wait(["answer"], wait + timedelta(seconds=_GRACE_S))
        answer = json.loads(store.get("answer"))
        store.add("read", 1)
        if rank == 0 and "error" in answer:  # this process may serve the store, and is to end
            deadline = time.monotonic() + _GRACE_S
            while store.add("read", 0) < args.world_size and time.monotonic() < deadline:
                time.sleep(0.05)
        return answer
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise EfaError(
            f"ranks could not agree on their hosts within {wait} through the store at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: see whether every rank "
            f"started with --efa-placement on ({reason})"
        ) from error


def _answer(store: Any, world_size: int, sizes: Sizes, wait: timedelta) -> dict[str, Any]:
    keys = [f"rank{rank}" for rank in range(world_size)]
    store.wait(keys, wait)
    try:
        told = [json.loads(value) for value in store.multi_get(keys)]
        return decide(told, current.current(), sizes)
    except EfaError as error:  # every rank is to end with it
        return {"error": str(error)}


def _store(rank: int, world_size: int, wait: timedelta) -> Any:
    """The job's store: torchrun's, or one that rank 0 of the launcher's numbering serves.

    Whoever is rank 0 afterwards may be on another host than MASTER_ADDR and cannot serve it: from
    here on the store counts as torchrun's would, to which every rank is a client.
    """
    import torch.distributed as dist

    from_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0 and not from_agent,
        timeout=wait,
        wait_for_workers=False,
    )
    if not from_agent:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        _kept.append(store)
    return store
