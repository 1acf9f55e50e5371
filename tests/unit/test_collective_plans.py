"""When a collective goes two-level, in how many pieces, and how large buckets are for a link."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.efa.cluster import current
from megatron.efa.cluster.model import Cluster, Link, Node
from megatron.efa.comm import choose
from megatron.efa.data import buckets, settings, sync
from megatron.efa.groups import TwoLevel, shape_of

MIB = 1 << 20
NEAR, FAR = Link(400e9, 5e-6), Link(50e9, 20e-6)


@pytest.fixture(autouse=True)
def forget():
    yield
    current.forget()


def group(*blocks):
    """A group with so many ranks on each node."""
    node_of = [node for node, size in enumerate(blocks) for _ in range(size)]
    shape = shape_of(range(sum(blocks)), node_of.__getitem__)
    return TwoLevel(None, shape, 0, 0, None, None)


def on(near=NEAR, far=FAR):
    current.use(Cluster((Node("a", 8),), near=near, far=far))


@pytest.mark.parametrize("blocks", [(8,), (1, 1, 1), (4, 3), (2, 4, 2)])
@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_a_group_without_two_levels_stays_flat(blocks, mode):
    on()
    assert choose.plan(group(*blocks), 64 * MIB, "all_reduce", mode, gpu=True) == choose.FLAT


@pytest.mark.parametrize("gpu", [False, True])
def test_the_switch_decides_unless_it_is_auto(gpu):
    current.use(Cluster((Node("a", 8),)))  # whose links are not known
    two = group(2, 2)
    assert not choose.plan(two, 64 * MIB, "all_reduce", "off", gpu).two_level
    assert choose.plan(two, 1, "all_reduce", "on", gpu).two_level
    assert choose.plan(two, 64 * MIB, "reduce_scatter", "auto", gpu).two_level


def test_auto_stays_flat_where_links_between_nodes_are_no_slower():
    on(near=FAR, far=FAR)
    assert not choose.plan(group(8, 8), 64 * MIB, "all_gather", "auto", gpu=True).two_level


sizes = st.integers(1, 1 << 32)
kinds = st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"])


@given(sizes, st.integers(2, 64), st.sampled_from([2, 4, 8]), kinds, st.booleans())
def test_auto_goes_two_level_only_for_a_promise_of_a_tenth(size, nodes, per_node, kind, gpu):
    on()
    two = group(*[per_node] * nodes)
    plan = choose.plan(two, size, kind, "auto", gpu)
    costs = choose.Costs(NEAR, FAR, gpu)
    ours = choose.two_level_seconds(two, size, kind, plan.pieces, costs)
    flat = choose.flat_seconds(two, size, kind, costs)
    assert ours <= 0.9 * flat or not plan.two_level


@given(sizes, st.integers(2, 64))
def test_a_piece_reaches_its_share_of_the_peak_rate(size, nodes):
    on()
    plan = choose.plan(group(*[8] * nodes), size, "all_gather", "on", gpu=True)
    message = size / 8 / plan.pieces
    if plan.pieces > 1:
        assert message / FAR.seconds(message) >= 0.8 * FAR.peak


@given(st.integers(2, 64), st.sampled_from([2, 4, 8]))
def test_a_bucket_sends_messages_that_reach_their_share_of_the_peak_rate(nodes, per_node):
    two = group(*[per_node] * nodes)
    message = choose.bucket_bytes(two, FAR) / per_node / nodes
    assert message / FAR.seconds(message) == pytest.approx(0.8 * FAR.peak, rel=1e-3)


def ddp_config(**given):
    wanted = {"overlap_grad_reduce": True, "bucket_size": None, "num_buckets": None}
    return SimpleNamespace(**wanted | {"grad_reduce_in_fp32": True} | given)


@pytest.fixture
def two_nodes(monkeypatch):
    """The switch is on, and every group lies on two nodes of four ranks."""
    monkeypatch.setattr(settings, "_mode", "on")
    monkeypatch.setattr(settings, "split", lambda _: group(4, 4))
    monkeypatch.setattr(buckets.dist, "get_rank", lambda: 0)


def test_buckets_follow_the_link_unless_a_flag_sizes_them(two_nodes, capsys):
    on()
    config = ddp_config()
    buckets.prepare(config, SimpleNamespace(dp_cp=None), [])
    assert config.bucket_size == choose.bucket_bytes(group(4, 4), FAR) // 4
    assert "2 nodes of 4 ranks, in buckets of 8000000 elements (32.0 MB)" in capsys.readouterr().out
    halves = ddp_config(grad_reduce_in_fp32=False)
    weight = SimpleNamespace(requires_grad=True, element_size=lambda: 2)
    chunk = SimpleNamespace(parameters=lambda: [weight])
    buckets.prepare(halves, SimpleNamespace(dp_cp=None), [chunk])
    assert halves.bucket_size == 2 * config.bucket_size


@pytest.mark.parametrize(
    "given",
    [{"bucket_size": 7}, {"num_buckets": 3}, {"overlap_grad_reduce": False}],
    ids=["size", "number", "no overlap"],
)
def test_buckets_are_left_alone_where_they_are_given(two_nodes, given):
    on()
    config = ddp_config(**given)
    buckets.prepare(config, SimpleNamespace(dp_cp=None), [])
    assert config == ddp_config(**given)


def test_buckets_are_upstreams_where_the_link_is_not_known(two_nodes):
    on(far=None)
    config = ddp_config()
    buckets.prepare(config, SimpleNamespace(dp_cp=None), [])
    assert config.bucket_size is None


def test_off_leaves_everything_to_upstream_untouched():
    assert settings.mode() == "off"
    bucket_group = SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=True),
        buckets=[SimpleNamespace(grad_data=None, param_data=None)],
        intra_distributed_optimizer_instance_group=None,
    )
    before = dict(vars(bucket_group))
    assert not sync.gather_parameters(bucket_group, True, False)
    bucket_group.buckets[0].grad_data = SimpleNamespace(nbytes=1 << 30, is_cuda=True)
    assert not sync.reduce_gradients(bucket_group, None, None, True, None, False)
    assert vars(bucket_group) == before
    config = ddp_config()
    buckets.prepare(config, None, [])
    assert config == ddp_config()
