"""Any group on any cluster: each rank is in one intra and one rail part; parts make the group."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.efa.cluster.current import forget, of_torchrun, use
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError
from megatron.efa.groups.shape import shape_of, spelled


@st.composite
def clusters(draw):
    """Nodes of any size, in NVLink domains of several nodes or none, side by side or mixed."""
    gpus = st.sampled_from([1, 2, 4, 8])
    alike = draw(st.booleans())
    first, count = draw(gpus), draw(st.integers(1, 12))
    sizes = [first if alike else draw(gpus) for _ in range(count)]
    per_domain = draw(st.integers(1, 4))
    domains = [f"domain{i // per_domain}" if per_domain > 1 else "" for i in range(count)]
    if draw(st.booleans()):
        domains = draw(st.permutations(domains))
    nodes = [
        Node(f"node{i}", size, domain=domain)
        for i, (size, domain) in enumerate(zip(sizes, domains, strict=True))
    ]
    return Cluster(tuple(nodes))


@st.composite
def layouts(draw, cluster):
    """Groups of one kind as Megatron lays them out: some of the axes of a grid of all ranks."""
    left, sizes = cluster.world_size, []
    while left > 1:
        sizes.append(draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
        left //= sizes[-1]
    grid = np.arange(cluster.world_size).reshape(sizes or [1])
    inside = [axis for axis in range(grid.ndim) if draw(st.booleans())]
    outside = [axis for axis in range(grid.ndim) if axis not in inside]
    size = math.prod(grid.shape[axis] for axis in inside)
    return grid.transpose(*outside, *inside).reshape(-1, size).tolist()


@given(data=st.data(), cluster=clusters())
@settings(max_examples=200, deadline=None)
def test_parts_partition_every_group(data, cluster):
    tiers = {"domain": cluster.domain_of, "node": cluster.node_of}
    place = tiers[data.draw(st.sampled_from(list(tiers)))]
    seen_intra, seen_rail = [], []
    for ranks in data.draw(layouts(cluster)):
        shape = shape_of(ranks, place)
        members = [rank for block in shape.blocks for rank in block]
        assert sorted(members) == ranks
        assert all(len({place(rank) for rank in block}) == 1 for block in shape.blocks)
        assert len({place(block[0]) for block in shape.blocks}) == shape.nodes
        seen_intra += members
        if shape.even:
            rails = shape.rails()
            assert shape.nodes * shape.per_node == len(ranks)
            assert len(rails) == shape.per_node
            assert {len(rail) for rail in rails} == {shape.nodes}
            assert all(len({place(rank) for rank in rail}) == shape.nodes for rail in rails)
            assert all(
                ranks.index(rank) == node * shape.per_node + index
                for index, rail in enumerate(rails)
                for node, rank in enumerate(rail)
            )
            seen_rail += [rank for rail in rails for rank in rail]
        else:
            seen_rail += ranks
    assert sorted(seen_intra) == sorted(seen_rail) == list(range(cluster.world_size))


@given(data=st.data(), cluster=clusters())
@settings(max_examples=100, deadline=None)
def test_only_unequal_or_interleaved_shares_are_uneven(data, cluster):
    for ranks in data.draw(layouts(cluster)):
        domains = [cluster.domain_of(rank) for rank in ranks]
        runs = [d for i, d in enumerate(domains) if i == 0 or domains[i - 1] != d]
        shares = {domains.count(domain) for domain in runs}
        assert shape_of(ranks, cluster.domain_of).even == (
            len(shares) == 1 and len(runs) == len(set(runs))
        )


def test_an_uneven_group_has_no_rails():
    with pytest.raises(ValueError, match="zip"):
        shape_of(range(5), lambda rank: rank // 3).rails()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "3"),
        ([0, 4], "0 4"),
        (range(8, 16), "8-15"),
        (range(0, 512, 8), "0 8 16 .. 504 (64 ranks)"),
    ],
)
def test_ranks_are_spelled_in_few_words(ranks, text):
    assert spelled(ranks) == text


def test_torchruns_nodes_are_the_cluster_unless_another_is_told(monkeypatch):
    from megatron.efa.cluster.current import current

    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [node.gpus for node in current().nodes] == [4, 4]
    use(Cluster((Node("one", 8),)))
    assert [node.gpus for node in current().nodes] == [8]
    forget()
    assert [node.gpus for node in current().nodes] == [4, 4]


def test_ranks_that_do_not_fill_the_nodes_are_refused():
    with pytest.raises(
        EfaError, match="WORLD_SIZE=6 is not a whole number of nodes of LOCAL_WORLD_"
    ):
        of_torchrun(6, 4)
