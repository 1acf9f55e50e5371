"""Which dispatcher `auto` takes, how many chunks, and what is refused or warned of."""

import itertools
import logging
from argparse import Namespace
from math import comb
from typing import get_args, get_type_hints

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron.efa import groups
from megatron.efa.cluster.current import forget, use
from megatron.efa.cluster.model import Cluster, Link, Node
from megatron.efa.comm.choose import Costs
from megatron.efa.errors import EfaError
from megatron.efa.expert import choose
from megatron.efa.expert import settings as switches

EFA = Costs(near=Link(400e9, 5e-6), far=Link(50e9, 20e-6), gpu=True)
DEEPSEEK = {"experts": 256, "topk": 8, "size": 4096 * 7168 * 2}


@pytest.fixture(autouse=True)
def clean():
    yield
    forget()
    groups.start.unexpect()
    switches._chunks, switches._fp8 = None, False


def cluster(nodes, per_node, far=None):
    near = None if far is None else Link(400e9, 5e-6)
    use(Cluster(tuple(Node(f"n{i}", per_node) for i in range(nodes)), near=near, far=far))


def args(**given):
    defaults = {
        "num_experts": 256,
        "moe_router_topk": 8,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_token_dispatcher_type": "auto",
        "expert_model_parallel_size": 32,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "seq_length": 4096,
        "micro_batch_size": 1,
        "hidden_size": 7168,
        "bf16": True,
        "fp16": False,
        "distributed_backend": "nccl",
        "rank": 0,
    }
    return Namespace(**defaults | given)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([(2, 8, 3), (4, 8, 2), (2, 6, 4), (3, 9, 1)]))
def test_expected_parts_are_the_mean_over_all_choices(case):
    parts, experts, topk = case
    each = experts // parts
    chosen = itertools.combinations(range(experts), topk)
    counted = sum(len({expert // each for expert in choice}) for choice in chosen)
    assert choose.expected_parts(parts, experts, topk) == pytest.approx(
        counted / comb(experts, topk)
    )


def test_a_token_crosses_as_often_as_the_design_says():
    """Top-8 of 256, 8 ranks a node: 4.0 times fewer copies at 2 nodes, 2.2 at 4, 1.5 at 8."""
    for nodes, ratio in ((2, 4.0), (4, 2.2), (8, 1.5)):
        copies, once, _ = choose.rows_a_token(choose.Layer(nodes, 8, 256, 8, 1))
        assert copies / once == pytest.approx(ratio, rel=0.03)


def test_auto_keeps_an_expert_group_in_one_node_flat(capsys):
    cluster(4, 8)
    flat = args(expert_model_parallel_size=8)
    switches.configure(flat)
    assert flat.moe_token_dispatcher_type == "alltoall"
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "auto: alltoall, since the 8 ranks of an expert group share a node" in said


def test_auto_goes_over_two_levels_between_nodes(capsys):
    cluster(4, 8)
    wide = args()
    switches.configure(wide)
    assert wide.moe_token_dispatcher_type == "hierarchical"
    assert "crosses the network 2.71 times instead of 6.00" in capsys.readouterr().out


def test_auto_counts_tokens_and_expert_tensor_parallel_ranks(monkeypatch):
    """EP4 x ETP2 on nodes of 4 is two nodes of two; sequence parallelism halves a rank's tokens."""
    cluster(2, 4)
    seen = []
    monkeypatch.setattr(choose, "better", lambda layer, costs: seen.append(layer) or ("flex", ""))
    sizes = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}
    switches.configure(args(**sizes, tensor_model_parallel_size=2, sequence_parallel=True))
    assert (seen[0].nodes, seen[0].per_node) == (2, 2)
    assert seen[0].size == 2048 * 7168 * 2


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_large_layers_win_on_two_levels(nodes):
    assert choose.better(choose.Layer(nodes, 8, **DEEPSEEK), EFA)[0] == "hierarchical"


def test_tiny_layers_stay_flat():
    """Eight tokens on two nodes: the stages' own time is more than that of the bytes."""
    tiny = choose.Layer(2, 8, 256, 8, 8 * 7168 * 2)
    assert choose.better(tiny, EFA)[0] == "alltoall"


def test_top_1_gains_nothing_from_two_levels():
    """One expert a token: as many bytes either way, and two levels have more stages."""
    assert choose.better(choose.Layer(2, 8, 256, 1, DEEPSEEK["size"]), EFA)[0] == "alltoall"


@settings(deadline=None)
@given(size=st.integers(1, 2**32), rate=st.floats(1e6, 1e11), latency=st.floats(1e-6, 1e-3))
def test_chunks_are_as_many_as_are_large_enough(size, rate, latency):
    costs = Costs(near=EFA.near, far=Link(rate, latency), gpu=True)
    chunks = choose.chunks_of(4, size, costs)
    least = Link(rate, latency + costs.stage).size_at(0.8)
    assert 1 <= chunks <= choose.MOST_CHUNKS
    assert chunks == 1 or size / chunks >= least
    assert chunks == choose.MOST_CHUNKS or size / (chunks + 1) < least


def test_groups_of_the_router_that_are_not_the_nodes_are_warned_of(caplog):
    cluster(4, 8)
    given = {"moe_token_dispatcher_type": "hierarchical", "moe_router_group_topk": 4}
    with caplog.at_level(logging.WARNING):
        switches.configure(args(**given, moe_router_num_groups=4))
        assert not caplog.records
        switches.configure(args(**given, moe_router_num_groups=8))
    assert "--moe-router-num-groups 8" in caplog.text
    assert "spans 4 nodes" in caplog.text


def test_groups_that_are_the_nodes_count_in_autos_choice():
    limited = choose.Layer(4, 8, **DEEPSEEK, most_nodes=2)
    assert choose.rows_a_token(limited)[1] == pytest.approx(2 * 3 / 4)


def test_no_chunks_are_refused():
    cluster(4, 8)
    with pytest.raises(EfaError, match="--efa-expert-chunks 0"):
        switches.configure(args(efa_expert_chunks=0))


def test_fp8_without_the_hierarchical_dispatcher_is_refused():
    cluster(4, 8)
    with pytest.raises(EfaError, match="--efa-dispatch-dtype fp8"):
        switches.configure(args(moe_token_dispatcher_type="alltoall", efa_dispatch_dtype="fp8"))


@pytest.fixture(scope="module")
def config_class():
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig


REFUSED = {
    "--moe-router-dtype fp64": {"moe_router_dtype": "fp64"},
    "--num-experts 40000": {"num_moe_experts": 40000},
    "CUDA graphs of the MoE": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_the_dispatcher_cannot_do_is_refused_in_a_sentence(config_class, said):
    base = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_moe_experts": 8}
    base |= {"add_bias_linear": False, "moe_token_dispatcher_type": "hierarchical"}
    config_class(**base)
    with pytest.raises(ValueError, match=said):
        config_class(**base | REFUSED[said])
    config_class(**base | REFUSED[said] | {"moe_token_dispatcher_type": "alltoall"})


def test_our_choices_of_dispatcher_are_upstreams_and_two_more(config_class):
    """The patch repeats upstream's choices: one that upstream adds must be added there too."""
    import ast
    import inspect

    source = ast.parse(inspect.getsource(inspect.getmodule(config_class)))
    kinds = [
        {constant.value for constant in ast.walk(node.annotation) if hasattr(constant, "value")}
        for node in ast.walk(source)
        if isinstance(node, ast.AnnAssign)
        and getattr(node.target, "id", "") == "moe_token_dispatcher_type"
    ]
    upstreams, ours = ({kind for kind in each if isinstance(kind, str)} for each in kinds)
    assert ours == upstreams | {"hierarchical", "auto"}
    assert set(get_args(get_type_hints(config_class)["moe_token_dispatcher_type"])) == ours
