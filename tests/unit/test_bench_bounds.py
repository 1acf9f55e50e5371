"""The lower bounds that benchmarks print, against counting token by token."""

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from megatron.efa.bench import bounds, routing  # noqa: E402


@st.composite
def layers(draw):
    """A routing on some nodes: (experts of each token of each rank, experts, nodes, per node)."""
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    experts = nodes * per_node * draw(st.integers(1, 4))
    topk = draw(st.integers(1, min(experts, 6)))
    token = st.lists(st.integers(0, experts - 1), min_size=topk, max_size=topk, unique=True)
    ranks = [draw(st.lists(token, max_size=6)) for _ in range(nodes * per_node)]
    return ranks, experts, topk, nodes, per_node


def matrices(ranks, experts, topk, nodes, per_node):
    rows = [[0] * nodes for _ in range(nodes)]
    copies = [[0] * nodes for _ in range(nodes)]
    for rank, tokens in enumerate(ranks):
        chosen = torch.tensor(tokens, dtype=torch.int64).view(-1, topk)
        for total, part in zip((rows, copies), bounds.rows_to_nodes(chosen, experts, nodes)):  # noqa: B905
            for node, count in enumerate(part):
                total[rank // per_node][node] += count
    return rows, copies


@settings(deadline=None)
@given(layers(), st.integers(1, 9))
def test_bound_is_a_row_a_token_and_remote_node_four_times(layer, row):
    ranks, experts, _, nodes, per_node = layer
    rows, copies = matrices(*layer)
    per_rank = experts // (nodes * per_node)
    pairs, remote = set(), 0
    for rank, tokens in enumerate(ranks):
        for number, token in enumerate(tokens):
            for expert in token:
                home = expert // per_rank // per_node
                if home != rank // per_node:
                    pairs.add((rank, number, home))
                    remote += 1
    assert bounds.bound_bytes(rows, row) == 4 * len(pairs) * row
    assert bounds.leaving(copies) == remote


@settings(deadline=None)
@given(layers(), st.integers(1, 9))
def test_bound_of_time_is_that_of_the_busiest_direction(layer, row):
    rows, _ = matrices(*layer)
    nodes = len(rows)
    through = []
    for node in range(nodes):
        others = [other for other in range(nodes) if other != node]
        through.append(sum(rows[node][other] for other in others))
        through.append(sum(rows[other][node] for other in others))
    assert bounds.bound_seconds(rows, row, 100.0) == pytest.approx(4 * max(through) * row / 100)


@pytest.mark.parametrize("kind", routing.KINDS)
@pytest.mark.parametrize(("experts", "topk", "nodes"), [(16, 4, 2), (24, 8, 4), (256, 8, 8)])
def test_every_routing_gives_each_token_its_own_experts(kind, experts, topk, nodes):
    layer = routing.Layer("x", experts, topk)
    random = torch.Generator().manual_seed(1)
    chosen = routing.choose(kind, layer, 100, nodes, random)
    assert chosen.shape == (100, topk)
    assert 0 <= chosen.min() <= chosen.max() < experts
    assert chosen.sort(dim=1).values.diff(dim=1).min() > 0


def test_balanced_routing_is_even_and_skewed_is_not():
    layer = routing.Layer("x", 64, 8)

    def loads(kind):
        chosen = routing.choose(kind, layer, 800, 4, torch.Generator().manual_seed(1))
        return torch.bincount(chosen.flatten(), minlength=64)

    assert loads("balanced").tolist() == [100] * 64
    assert loads("skewed").max() > 2 * loads("uniform").max()


def test_node_limited_routing_reaches_half_of_the_nodes():
    layer = routing.Layer("x", 64, 8)
    chosen = routing.choose("node-limited", layer, 200, 8, torch.Generator().manual_seed(1))
    reached = [set(row) for row in (chosen // 8).tolist()]
    assert max(map(len, reached)) == 4
    assert set.union(*reached) == set(range(8))


def test_a_recorded_routing_comes_back_and_repeats(tmp_path):
    chosen = torch.tensor([[0, 3], [2, 1], [3, 2]])
    routing.save(tmp_path / "r.pt", 4, chosen)
    record = routing.load(tmp_path / "r.pt")
    assert (record.layer.experts, record.layer.topk) == (4, 2)
    assert record.of_rank(1, 4).tolist() == [[2, 1], [3, 2], [0, 3], [2, 1]]


@pytest.mark.parametrize(
    "content",
    [
        b"text",
        {},
        {"experts": 4, "chosen": torch.tensor([[1, 1]])},
        {"experts": 2, "chosen": torch.tensor([[0, 2]])},
    ],
)
def test_what_is_no_record_is_told(tmp_path, content):
    from megatron.efa.errors import EfaError

    path = tmp_path / "r.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(EfaError, match=r"--routing .*r\.pt"):
        routing.load(path)
