"""The groups of any rank of a large job, on fake process groups: against upstream, and agreeing."""

import importlib.util
import inspect
import re
from argparse import Namespace
from contextlib import contextmanager
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state
from megatron.efa import groups
from megatron.efa.cluster.current import forget, of_torchrun, use
from megatron.efa.groups import start
from megatron.efa.groups.axes import KEYS

PER_NODE = 8
# As in pretraining of large mixtures of experts: EP over eight nodes, pipeline stages far apart.
LARGE = {
    "pipeline_model_parallel_size": 8,
    "expert_model_parallel_size": 64,
    "expert_tensor_parallel_size": 1,
}
SMALL = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
    "num_distributed_optimizer_instances": 2,
}
EXPECTED = [("ep", "dispatch"), ("dp_cp", "grads"), ("ep_dp", "grads"), ("pp", "forward")]


@contextmanager
def view(rank, world, on, state=parallel_state, **sizes):
    """Make the model-parallel groups as `rank` of `world` does; yields what it asked torch for."""
    asked, real = [], dist.new_group

    def new_group(*args, **kwargs):
        asked.append(inspect.signature(real).bind(*args, **kwargs).arguments)
        if asked[-1].get("backend") == "gloo":  # which would look for peers that are not there
            kwargs["backend"] = "fake"
        return real(*args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    use(of_torchrun(world, PER_NODE))
    groups.configure(Namespace(efa_groups=on))
    dist.new_group = new_group
    try:
        state.initialize_model_parallel(**sizes)
        yield asked
    finally:
        dist.new_group = real
        state.destroy_model_parallel()
        dist.destroy_process_group()
        groups.configure(Namespace())
        forget()


@pytest.fixture
def expected(monkeypatch):
    monkeypatch.setattr(start, "_expected", set())
    for axis, purpose in EXPECTED:
        groups.expect(axis, purpose)


def here():
    """This rank's groups of Megatron's and ours, in the order of their making: (name, ranks)."""
    made = list(dist.distributed_c10d._world.pg_map)[1:]
    return [(group.group_desc, tuple(dist.get_process_group_ranks(group))) for group in made]


def requests(asked):
    """Calls of new_group without what only says how the members meet."""
    return [(call["group_desc"], tuple(call["ranks"]), str(call["timeout"])) for call in asked]


@pytest.fixture(scope="module")
def upstream(plain_tree):
    """Upstream's own parallel_state beside the fork's, in one process."""
    path = Path(plain_tree) / "megatron" / "core" / "parallel_state.py"
    spec = importlib.util.spec_from_file_location("megatron.core._plain_parallel_state", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rank", [0, 13, 63])
def test_off_every_call_to_torch_is_upstreams(upstream, rank):
    with view(rank, 64, False, upstream, **SMALL) as theirs:
        pass
    with view(rank, 64, False, **SMALL) as ours:
        pass
    assert ours == theirs
    assert len(ours) > 100


@pytest.mark.parametrize("rank", [0, 13, 63])
def test_on_a_rank_makes_those_of_upstreams_groups_that_it_is_in(upstream, rank):
    with view(rank, 64, False, upstream, **SMALL) as theirs:
        before = here()
    with view(rank, 64, True, **SMALL) as ours:
        after = here()
    assert requests(ours) == [call for call in requests(theirs) if rank in call[1]]
    assert after == before
    assert all(call["use_local_synchronization"] for call in ours)


def test_all_ranks_make_their_groups_in_one_order(expected):
    """Groups as vertices, an edge from each group of a rank to its next: a circle would be ranks
    that wait for one another."""
    world, after = 64, {}
    for rank in range(world):
        with view(rank, world, True, **SMALL):
            sequence = here()
        assert len(sequence) == len(set(sequence)), "one name for two groups of the same ranks"
        assert all(rank in ranks for _, ranks in sequence)
        for first, second in pairwise(sequence):
            after.setdefault(second, set()).add(first)
    order = list(TopologicalSorter(after).static_order())  # raises CycleError
    assert len(order) > 200


def peak_mib():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


@pytest.mark.parametrize("world", [512, 1024, 2048])
def test_views_of_a_large_job_agree(expected, world):
    ranks = [0, 7, 8, world // 2 - 1, world // 2, world - 1]
    sequences = {}
    for rank in ranks:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = peak_mib()
        with view(rank, world, True, **LARGE) as asked:
            sequences[rank] = here()
            assert peak_mib() - before < 1024
            assert all(rank in call["ranks"] for call in asked), "made a group of other ranks"
            assert len(asked) < 50, "the number of groups that a rank makes grows with the job"
    parts = [name for name, _ in sequences[0] if name.startswith("efa:ep:dispatch")]
    assert parts == ["efa:ep:dispatch:intra", "efa:ep:dispatch:rail"]
    for a in ranks:
        for b in ranks:
            shared = [entry for entry in sequences[a] if b in entry[1]]
            assert shared == [entry for entry in sequences[b] if a in entry[1]]
            assert shared, "the views have no group in common"


@pytest.mark.parametrize("world", [512, 2048])
def test_all_parts_of_a_large_job_make_up_its_groups(world):
    """From one view, since upstream lists the groups of all: each rank is in each kind once."""
    with view(3, world, False, **LARGE) as asked:
        pass
    cluster = of_torchrun(world, PER_NODE)
    kinds = {}
    for call in asked:
        if "GLOO" not in call["group_desc"]:
            kinds.setdefault(call["group_desc"], []).append(tuple(call["ranks"]))
    assert len(kinds) > 15
    for name, members in kinds.items():
        shapes = [groups.shape_of(ranks, cluster.domain_of) for ranks in members]
        assert all(shape.even for shape in shapes), name
        intra = [rank for shape in shapes for block in shape.blocks for rank in block]
        rails = [rank for shape in shapes for rail in shape.rails() for rank in rail]
        assert sorted(intra) == sorted(rails) == sorted(r for ranks in members for r in ranks)
        assert len(set(intra)) == len(intra), f"{name}: groups of one kind overlap"


def test_every_group_of_upstreams_has_an_axis_with_its_own_key():
    """Its description leads to the key with which upstream looks up its options."""
    source = inspect.getsource(parallel_state)
    calls = re.findall(r"= create_group\((.*?)\n {4,}\)\n", source, re.DOTALL)
    found = {}
    for call in calls:
        key = re.search(r"get_nccl_options\(['\"](\w+)['\"]", call)
        name = re.search(r"group_desc=['\"](\w+)['\"]", call)
        if key and name:
            found[name[1]] = key[1]
    assert len(found) > 20
    for name, key in found.items():
        assert groups.axis_of(Namespace(group_desc=name)) == key
    names = set(re.findall(r"group_desc=f?['\"](\w+)", source))
    for name in names:
        axis = groups.axis_of(Namespace(group_desc=name))
        assert axis in KEYS.values() or name.endswith("_"), name  # an f-string's beginning


@pytest.mark.parametrize(
    ("described", "axis", "tier"),
    [
        ("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1", "inter_ep_dp", ""),
        ("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0", "intra_ep_dp", ""),
        ("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0", "hcp", ""),
        ("HYBRID_DP_CP_GROUP_4", "dp_cp", ""),
        ("EXPERT_DATA_PARALLEL_GROUP_AG", "ep_dp", ""),
        ("efa:ep:dispatch:rail", "ep", "rail"),
        ("default_pg", "world", ""),
        ("undefined", "undefined", ""),
    ],
)
def test_a_description_names_axis_and_tier(described, axis, tier):
    group = Namespace(group_desc=described)
    assert (groups.axis_of(group), groups.tier_of(group)) == (axis, tier)


def test_no_group_is_the_world():
    assert groups.axis_of(None) == "world"
