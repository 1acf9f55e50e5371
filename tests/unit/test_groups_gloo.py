"""Two-level groups on eight real gloo ranks: as 2 nodes of 4, 4 of 2, uneven, in NVLink domains."""

import logging
import queue
import traceback
from argparse import Namespace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron.efa import groups
from megatron.efa.cluster.current import use
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError
from megatron.efa.groups import create, parts, start

RANKS = 8
TIMEOUT = timedelta(seconds=60)


def serve(rank, store, tasks, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    for task, *arguments in iter(tasks.get, None):
        try:
            answers.put((rank, task(rank, *arguments)))
        except Exception:
            answers.put((rank, traceback.format_exc()))
        groups.forget()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    from megatron.core import parallel_state  # noqa: F401  (once, for all that are forked)

    context, store = mp.get_context("fork"), tmp_path_factory.mktemp("store") / "store"
    tasks = [context.Queue() for _ in range(RANKS)]
    answers = context.Queue()
    processes = [
        context.Process(target=serve, args=(rank, store, tasks[rank], answers), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()

    def ask(*task):
        for waiting in tasks:
            waiting.put(task)
        results = {}
        try:
            while len(results) < RANKS:
                rank, result = answers.get(timeout=120)
                results[rank] = result
        except queue.Empty:
            pytest.fail(f"ranks {set(range(RANKS)) - set(results)} do not answer; got {results}")
        failed = [text for text in results.values() if isinstance(text, str) and "Trace" in text]
        assert not failed, failed[0]
        return [results[rank] for rank in range(RANKS)]

    yield ask
    for waiting in tasks:
        waiting.put(None)
    for process in processes:
        process.join(30)
        process.kill()


def nodes_of(*gpus, domains=()):
    names = domains or [""] * len(gpus)
    made = (Node(f"node{i}", n, domain=d) for i, (n, d) in enumerate(zip(gpus, names, strict=True)))
    return Cluster(tuple(made), source="a test")


members = dist.get_process_group_ranks


def split_world(rank, cluster):
    use(cluster)
    two = groups.two_level(None, "all")
    return members(two.intra), members(two.rail), two.node, two.index, two.nodes, two.per_node


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_parts_of_the_world(ranks, per_node):
    for rank, answer in enumerate(ranks(split_world, nodes_of(*[per_node] * (RANKS // per_node)))):
        node, index = divmod(rank, per_node)
        intra = list(range(node * per_node, (node + 1) * per_node))
        rail = list(range(index, RANKS, per_node))
        assert answer == (intra, rail, node, index, RANKS // per_node, per_node)


def work_at_once(rank, cluster):
    """Sums of rank numbers over every part and the group itself, all in flight together."""
    use(cluster)
    first, second = groups.two_level(None, "one"), groups.two_level(None, "other")
    assert first is groups.two_level(None, "one")
    assert first.intra is not second.intra
    inside = [first.intra, second.intra, first.flat, first.rail, second.rail]
    sums, works = [], []
    for group in inside if rank % 2 else reversed(inside):
        sums.append((members(group), torch.full((1000,), float(rank))))
        works.append(dist.all_reduce(sums[-1][1], group=group, async_op=True))
    for work in works:
        work.wait()
    return [(group, total[0].item(), total[-1].item()) for group, total in sums]


@pytest.mark.parametrize("gpus", [(4, 4), (2, 2, 2, 2)])
def test_parts_of_two_purposes_and_the_group_work_at_once(ranks, gpus):
    """Ranks even start them in another order than in which odd ones do."""
    for answer in ranks(work_at_once, nodes_of(*gpus)):
        assert all(first == last == sum(group) for group, first, last in answer)


def three_tiers(rank, cluster):
    use(cluster)
    wide = groups.two_level(None, "wide")
    narrow = groups.two_level(wide.intra, "wide", by="node")
    return [members(g) for g in (wide.intra, wide.rail, narrow.intra, narrow.rail)]


def test_an_nvlink_domain_of_several_nodes_is_one_node_and_has_a_tier_inside(ranks):
    answers = ranks(three_tiers, nodes_of(2, 2, 2, 2, domains=["a", "a", "b", "b"]))
    assert answers[0] == [[0, 1, 2, 3], [0, 4], [0, 1], [0, 2]]
    assert answers[7] == [[4, 5, 6, 7], [3, 7], [6, 7], [5, 7]]


def uneven(rank, cluster):
    use(cluster)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    parts._log.addHandler(handler)
    both = [groups.two_level(None, purpose) for purpose in ("one", "other")]
    parts._log.removeHandler(handler)
    spans = [(two.even, two.intra, two.rail, two.spans_nodes) for two in both]
    return said, spans


def test_an_uneven_group_stays_flat_and_one_rank_says_so_once(ranks):
    answers = ranks(uneven, nodes_of(3, 5))
    assert all(spans == [(False, None, None, False)] * 2 for _, spans in answers)
    assert [len(said) for said, _ in answers] == [1, *[0] * (RANKS - 1)]
    assert "group world of ranks 0-7 lies unevenly on its nodes (3 + 5)" in answers[0][0][0]


def other_size(rank):
    use(nodes_of(8, 8))
    try:
        groups.two_level(None, "all")
    except EfaError as error:
        return str(error)
    return "made"


def test_a_cluster_of_another_size_is_refused(ranks):
    assert set(ranks(other_size)) == {
        "the cluster (from a test) holds 16 ranks and this job has 8: describe the nodes that it "
        "runs on"
    }


def unequal_counts(rank):
    """Groups of some ranks before groups of all, and the same ranks under one name again."""
    made = []
    if rank < 3:
        made.append(create.new_group(range(3), "first"))
    if rank == 1:
        made.append(create.new_group([1], "alone"))
    if rank in (1, 7):
        made += [create.new_group([1, 7], "pair"), create.new_group([1, 7], "pair")]
    made.append(create.new_group(range(RANKS), "all"))
    made.append(dist.new_group())  # torch's own counter must not have moved apart
    total = []
    for group in made:
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=group)
        total.append((value.item(), float(sum(members(group)))))
    return total


def test_ranks_with_unequal_numbers_of_groups_meet(ranks):
    for answer in ranks(unequal_counts):
        assert all(got == wanted for got, wanted in answer)


def nobody_comes(rank):
    try:
        if rank == 0:
            create.new_group([0, 5], "efa:ep:dispatch:rail", timedelta(seconds=1))
    except EfaError as error:
        return str(error)
    return ""


def test_a_group_that_cannot_be_made_is_one_sentence_of_group_and_rank(ranks):
    sentence, *others = ranks(nobody_comes)
    assert sentence.startswith("rank 0 cannot make group efa:ep:dispatch:rail of ranks 0 5: ")
    assert "\n" not in sentence
    assert not any(others)


def megatrons(rank, cluster, sizes, on):
    from megatron.core import parallel_state as mpu

    use(cluster)
    groups.configure(Namespace(efa_groups=on))
    groups.expect("ep", "dispatch")
    groups.expect("dp_cp", "grads")
    minutes = 7
    mpu.initialize_model_parallel(**sizes, distributed_timeout_minutes=minutes)
    early = len(parts._made)
    pipeline, ep = mpu.get_pipeline_model_parallel_group(), mpu.get_expert_model_parallel_group()
    two = groups.two_level(ep, "dispatch")
    timeouts = {
        group._get_backend(torch.device("cpu")).options._timeout for group in (ep, two.intra)
    }
    sums = []
    for group in (pipeline, ep, two.intra, two.rail, mpu.get_model_parallel_group()):
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=group)
        sums.append((value.item(), float(sum(members(group)))))
    listed = two.rail in mpu._global_process_group_list
    axes = [groups.axis_of(pipeline), groups.axis_of(two.rail), groups.tier_of(two.rail)]
    mpu.destroy_model_parallel()
    left = len(parts._made) + len(start._groups)
    groups.configure(Namespace())
    return (
        early, sums, timeouts == {timedelta(minutes=minutes)}, listed, axes,
        members(two.intra) if two.intra in dist.distributed_c10d._world.pg_map else None, left,
    )  # fmt: skip


@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [
        # The embedding group has members in two of four stages: unequal numbers of groups.
        ((4, 4), {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2}),
        ((2, 2, 2, 2), {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4}),
        ((4, 4), {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8,
                  "expert_tensor_parallel_size": 1}),
    ],
    ids=["2x4 PP4 EP2", "4x2 PP2 EP4", "2x4 TP2 EP8"],
)  # fmt: skip
def test_megatrons_groups_are_made_split_and_forgotten(ranks, gpus, sizes, on):
    for early, sums, timeouts, listed, axes, closed, left in ranks(
        megatrons, nodes_of(*gpus), sizes, on
    ):
        assert early == (2 if on else 0)
        assert all(got == wanted for got, wanted in sums)
        assert timeouts, "a part has another timeout than its group"
        assert listed, "upstream's update of timeouts would not reach a part"
        assert axes == ["pp", "ep", "rail"]
        assert closed is None or len(closed) == sizes["expert_model_parallel_size"]
        assert left == 0
