"""Placement is an order of the hosts, never worse than the usual ones, and moves few on repair."""

import argparse
import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.efa.bench import placement as bench
from megatron.efa.cluster import place_cli, search
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.cluster.place import ordered_hosts, place
from megatron.efa.cluster.traffic import Sizes, Traffic
from megatron.efa.errors import EfaError

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
MOE = Sizes(
    pipeline_model_parallel_size=2,
    expert_model_parallel_size=8,
    expert_tensor_parallel_size=1,
    num_experts=16,
)


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def jobs(draw, most=24):
    """A cluster of uneven switches and sizes that fit it."""
    nodes, gpus = draw(st.sampled_from([n for n in (4, 6, 8, 12, 24) if n <= most])), 4
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.sampled_from(divisors(nodes * gpus // tp)))
    cp = draw(st.sampled_from(divisors(nodes * gpus // tp // pp)))
    ep = draw(st.sampled_from(divisors(nodes * gpus // pp)))
    sizes = Sizes(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        num_experts=draw(st.sampled_from([None, 64])),
        num_virtual_stages_per_pipeline_rank=draw(st.sampled_from([None, 2])),
    )
    depth = draw(st.integers(1, 4))
    paths = draw(
        st.lists(
            st.lists(st.sampled_from("ab"), min_size=depth, max_size=depth),
            min_size=nodes,
            max_size=nodes,
        )
    )
    names = [f"h{i:02}" for i in draw(st.permutations(range(nodes)))]
    whole = [tuple("".join(path[: i + 1]) for i in range(depth)) for path in paths]
    return Cluster(tuple(map(lambda n, p: Node(n, gpus, p), names, whole))), sizes


def weight_of(cluster, sizes):
    parts = Traffic(sizes, cluster.world_size).between_nodes(cluster.nodes[0].gpus)
    return sum(parts.values())


def cost_of(nodes, sizes):
    """Traffic x distance from the definition: over pairs of nodes, by `Cluster.distance`."""
    cluster = Cluster(tuple(nodes))
    weight = weight_of(cluster, sizes)
    pairs = itertools.combinations(range(len(nodes)), 2)
    return sum(weight[i, j] * cluster.distance(i, j) for i, j in pairs)


@given(job=jobs(), dice=st.integers(0, 99).map(random.Random))
@QUICK
def test_is_an_order_of_whole_hosts_and_never_worse_than_the_usual_orders(job, dice):
    cluster, sizes = job
    placement = place(cluster, sizes)
    nodes = placement.after.nodes
    assert sorted(n.name for n in nodes) == sorted(n.name for n in cluster.nodes)
    assert set(nodes) == set(cluster.nodes)
    got = cost_of(nodes, sizes) * (1 - 1e-9)
    old, new = placement.totals
    assert (old, new) == pytest.approx((cost_of(cluster.nodes, sizes), cost_of(nodes, sizes)))
    by_chance = dice.sample(cluster.nodes, len(nodes))
    for other in (
        cluster.nodes,
        sorted(cluster.nodes, key=lambda n: n.name),
        sorted(cluster.nodes, key=lambda n: (n.path, n.name)),
        by_chance,
    ):
        assert got <= cost_of(other, sizes)


@given(job=jobs(), dice=st.integers(0, 99).map(random.Random))
@QUICK
def test_hosts_that_come_in_another_order_are_placed_as_well(job, dice):
    cluster, sizes = job
    first = place(cluster, sizes)
    assert place(cluster, sizes).after == first.after
    nodes = dice.sample(cluster.nodes, len(cluster.nodes))
    again = place(Cluster(tuple(nodes)), sizes)
    assert again.totals[1] == pytest.approx(first.totals[1])
    if first.moved and again.moved:  # neither came in an order as good as what was found
        assert again.after.nodes == first.after.nodes
    assert place(first.after, sizes).moved == 0


@given(job=jobs(most=8))
@settings(QUICK, max_examples=40)
def test_is_the_optimum_of_up_to_eight_hosts(job):
    cluster, sizes = job
    weight, count = weight_of(cluster, sizes), len(cluster.nodes)
    distance = search.distances([node.path for node in cluster.nodes])
    orders = np.array(list(itertools.permutations(range(count))))
    pairs = itertools.combinations(range(count), 2)
    costs = sum(weight[i, j] * distance[orders[:, i], orders[:, j]] for i, j in pairs)
    assert place(cluster, sizes).totals[1] <= costs.min() * (1 + 1e-9)


@given(job=jobs(), data=st.data())
@QUICK
def test_a_replaced_host_is_the_only_one_that_moves(job, data):
    cluster, sizes = job
    names = ordered_hosts(cluster, sizes)
    gone = data.draw(st.integers(0, len(names) - 1))
    others = tuple(node for node in cluster.nodes if node.name != names[gone])
    spares = tuple(
        Node(f"s{i}", 4, data.draw(st.sampled_from(cluster.nodes)).path) for i in range(3)
    )
    placement = place(Cluster(others, spares), sizes, previous=names)
    after = list(placement.after.nodes)
    assert placement.moved == 1
    assert [n.name for n in after[:gone] + after[gone + 1 :]] == names[:gone] + names[gone + 1 :]
    assert {n.name for n in placement.after.spares} == {n.name for n in spares} - {after[gone].name}
    for spare in spares:  # no other spare would have been nearer
        instead = [*after[:gone], spare, *after[gone + 1 :]]
        assert cost_of(after, sizes) <= cost_of(instead, sizes) * (1 + 1e-9)
    assert place(Cluster(tuple(after)), sizes, [n.name for n in after]).moved == 0


@given(job=jobs(), data=st.data())
@QUICK
def test_swaps_are_priced_as_they_come_to(job, data):
    cluster, sizes = job
    weight = weight_of(cluster, sizes)
    distance = search.distances([node.path for node in cluster.nodes])
    order = np.array(data.draw(st.permutations(range(len(cluster.nodes)))))
    costs = [search.cost(weight, distance, order)]
    for swaps in range(1, 6):
        costs.append(search.cost(weight, distance, search.improve(weight, distance, order, swaps)))
    assert costs == sorted(costs, reverse=True)
    end = search.improve(weight, distance, order, 1000)
    best = search.cost(weight, distance, end)
    for a, b in itertools.combinations(range(len(end)), 2):
        other = end.copy()
        other[[a, b]] = other[[b, a]]
        assert best <= search.cost(weight, distance, other) * (1 + 1e-9)


@given(job=jobs(most=8))
@QUICK
def test_the_bound_of_the_bench_is_a_bound(job):
    cluster, sizes = job
    floor = bench.lower_bound(weight_of(cluster, sizes), [n.path for n in cluster.nodes])
    assert floor <= place(cluster, sizes).totals[1] * (1 + 1e-9)


def test_on_fragmented_capacity_much_less_than_by_name_and_less_than_by_tree():
    for job in ("1T MoE, TP8 PP8 EP32", "70B dense, TP8 PP16"):
        found = bench.compare(bench.fragmented(128, seed=3), bench.job_sizes(job))
        assert 1 <= found["ours"] < found["tree"] < found["name"]
        assert found["ours"] < found["random"]


@pytest.mark.parametrize("mapping", [False, True], ids=["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp", "ep", "edp"])
def test_who_exchanges_is_as_upstreams_groups_say(axis, mapping):
    from megatron.core.parallel_state import RankGenerator

    tp, cp, pp, world, ep = 2, 2, 3, 48, 4
    order = "tp-cp-ep-pp-dp" if mapping else "tp-cp-ep-dp-pp"
    experts = None if mapping else 8
    sizes = Sizes(tp, pp, cp, ep, 1, mapping, num_experts=experts)
    if axis in ("ep", "edp") and mapping:
        pytest.skip("upstream refuses it with experts")
    if axis in ("ep", "edp"):
        generator = RankGenerator(tp=1, ep=ep, dp=world // ep // pp, pp=pp, cp=1, order=order)
        token = "ep" if axis == "ep" else "dp"
    else:
        generator = RankGenerator(
            tp=tp, ep=1, dp=world // tp // cp // pp, pp=pp, cp=cp, order=order
        )
        token = {"dp": "dp-cp"}.get(axis, axis)
    meet = np.zeros((world, world), dtype=bool)
    for ranks in generator.get_ranks(token):
        pairs = itertools.pairwise(ranks) if axis == "pp" else itertools.combinations(ranks, 2)
        for a, b in pairs:
            meet[a, b] = meet[b, a] = True
    assert (Traffic(sizes, world).between_nodes(1)[axis] > 0).tolist() == meet.tolist()
    on_nodes = Traffic(sizes, world).between_nodes(4)[axis]
    alone = Traffic(sizes, world).between_nodes(1)[axis].reshape(12, 4, 12, 4).sum((1, 3))
    np.fill_diagonal(alone, 0)
    assert on_nodes == pytest.approx(alone)


def test_hosts_stay_where_there_is_nothing_to_choose_by():
    unknown = Cluster(tuple(Node(f"h{i}", 8) for i in (2, 0, 1, 3)))
    assert place(unknown, MOE).after == unknown
    assert "nothing is known of the network" in place(unknown, MOE).summary()
    uneven = Cluster((Node("a", 8, ("x",)), Node("b", 4, ("y",)), Node("c", 4, ("x",))))
    assert place(uneven, MOE).after == uneven
    assert "different numbers of ranks" in place(uneven, MOE).summary()


def test_nvlink_domains_of_several_hosts_are_nearer_than_a_switch():
    nodes = [Node(f"h{i}", 4, ("x",), domain="pq"[i % 2]) for i in range(8)]
    sizes = Sizes(1, 1, 1, 16, 1, num_experts=16, global_batch_size=4096)
    after = place(Cluster(tuple(nodes)), sizes).after.nodes
    assert len({node.domain for node in after[:4]}) == len({node.domain for node in after[4:]}) == 1


FOUR = Cluster(tuple(Node(f"h{i}", 8, ("x",)) for i in range(4)))
MISTAKES = {
    "sizes": (
        FOUR,
        Sizes(pipeline_model_parallel_size=3),
        None,
        "make 3, which does not divide 32",
    ),
    "experts": (FOUR, Sizes(expert_model_parallel_size=64), None, "make 64, which does not divide"),
    "mapping": (
        FOUR,
        Sizes(1, 2, 1, 4, 1, True, num_experts=8),
        None,
        "needs equal dense and expert data parallel sizes, which are 16 and 4",
    ),
    "names": (Cluster(FOUR.nodes + FOUR.nodes[:1]), Sizes(), None, "two hosts of the name h0"),
    "length": (FOUR, Sizes(), ["h0", "h1"], "has 2 hosts, the cluster 4 and 0 spares"),
    "twice": (FOUR, Sizes(), ["h0", "h0", "h1", "h2"], "names a host twice"),
}


@pytest.mark.parametrize(
    ("cluster", "sizes", "previous", "sentence"), MISTAKES.values(), ids=MISTAKES
)
def test_what_cannot_be_placed_is_one_sentence(cluster, sizes, previous, sentence):
    with pytest.raises(EfaError) as error:
        place(cluster, sizes, previous)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_a_size_is_a_positive_whole_number(value):
    with pytest.raises(EfaError, match="pipeline_model_parallel_size is"):
        Sizes.of({"pipeline_model_parallel_size": value})


@pytest.fixture
def command(capsys):
    """Run `topology place WORDS` on a cluster; returns what it printed."""

    def command(cluster, *words):
        parser = argparse.ArgumentParser()
        place_cli.add_arguments(parser)
        assert place_cli.run(parser.parse_args([*map(str, words)]), cluster) == 0
        return capsys.readouterr().out

    return command


def test_command_takes_config_or_flags_and_writes_a_hostfile_that_it_reads(command, tmp_path):
    nodes = [Node(f"h{i}", 4, ("xy"[i % 2],)) for i in range(8)]
    random.Random(1).shuffle(nodes)
    config, hosts = tmp_path / "run.yaml", tmp_path / "hosts"
    config.write_text(
        "parallel:\n  expert_model_parallel_size: 16\n  expert_tensor_parallel_size: 1\n"
        "model:\n  num_experts: 16\ntrain:\n  global_batch_size: 4096\n"
    )
    flags = "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --num-experts 16 "
    flags += "--global-batch-size 4096"
    cluster = Cluster(tuple(nodes))
    shown = command(cluster, "--config", config, "--hostfile", hosts)
    assert shown == command(cluster, *flags.split())
    assert "total" in shown
    data = json.loads(command(cluster, "--config", config, "--json"))
    named = [host["name"] for host in data["hosts"]]
    assert place_cli.read_hosts(hosts) == named
    assert hosts.read_text().splitlines()[0] == f"{named[0]} slots=4"
    assert data["hosts"][1]["ranks"] == [4, 7]
    assert data["byte_hops"]["ep"]["after"] < data["byte_hops"]["ep"]["before"]
    kept = json.loads(command(cluster, *flags.split(), "--previous", hosts, "--json"))
    assert kept["moved"] == 0


def test_a_hostfile_that_cannot_be_used_is_one_sentence(tmp_path):
    with pytest.raises(EfaError, match="cannot read the hostfile"):
        place_cli.read_hosts(tmp_path / "none")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(EfaError, match="names no host"):
        place_cli.read_hosts(tmp_path / "empty")
    with pytest.raises(EfaError, match="cannot write the hostfile"):
        place_cli.write_hosts(tmp_path / "empty" / "below", FOUR)
