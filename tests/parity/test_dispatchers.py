"""The hierarchical dispatcher gives what upstream's all-to-all gives, on gloo ranks."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from megatron.efa import cpu
from megatron.efa.cluster.current import use
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError
from megatron.efa.groups import parts
from tests.unit.gloo_ranks import GlooRanks

RANKS = 8
SHAPES = [(1, 4), (4, 1), (2, 2), (2, 4), (4, 2), (3, 2)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_groups, _parts = {}, {}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    # Imported here, once, for all that are forked; there it runs on CPUs.
    import megatron.efa.expert.dispatcher  # noqa: F401

    pool = GlooRanks(RANKS, tmp_path_factory.mktemp("store"))
    yield pool
    pool.close()


@st.composite
def cases(draw, dtypes=tuple(DTYPES)):
    nodes, per_node = draw(st.sampled_from(SHAPES))
    local = draw(st.integers(1, 3))
    experts = nodes * per_node * local
    return {
        "shape": (nodes, per_node),
        "local": local,
        "topk": draw(st.integers(1, min(16, experts))),
        "tokens": draw(
            st.lists(st.integers(0, 9), min_size=nodes * per_node, max_size=nodes * per_node)
        ),
        "hidden": draw(st.sampled_from([1, 8, 40])),
        "dtype": draw(st.sampled_from(dtypes)),
        "chunks": draw(st.sampled_from([None, 1, 2, 5])),
        "skew": draw(st.sampled_from([0.0, 3.0])),
        "dropped": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "seed": draw(st.integers(0, 1000)),
    }


EXAMPLES = {"max_examples": 40, "deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(**EXAMPLES)
@given(case=cases())
def test_outputs_and_gradients_are_upstreams(ranks, case):
    """Within 1e-5 in fp32. In 16 bits within four roundings, half a unit in the last place each:
    one by the experts here, one for each level of the sum."""
    for difference in ranks(compare, case):
        assert difference is None or max(difference.values()) <= 1, difference


@settings(**EXAMPLES | {"max_examples": 10})
@given(case=cases(dtypes=("fp32", "bf16")))
def test_fp8_on_the_wire_is_near(ranks, case):
    """Tokens are rounded to 3 bits and more; what is computed of them is off by no more."""
    for difference in ranks(compare, case | {"fp8": True}):
        assert difference is None or max(difference.values()) <= 1, difference


@settings(**EXAMPLES | {"max_examples": 10})
@given(case=cases())
def test_chunks_change_no_bit(ranks, case):
    assert all(ranks(chunked_alike, case))


def test_a_router_that_exceeds_topk_is_refused(ranks):
    case = {"shape": (2, 2), "local": 2, "topk": 2, "tokens": [3, 0, 2, 1], "hidden": 8}
    case |= {"dtype": "fp32", "chunks": None, "skew": 0.0, "dropped": 0.0, "seed": 0}
    answers = ranks(too_many, case)
    assert all("routed to 3 experts" in said for said in answers[:4]), answers


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 1)])
def test_padding_to_capacity_gives_experts_as_many_rows(ranks, shape):
    """As upstream: every expert works on C rows of every rank, whatever is in them."""
    size = shape[0] * shape[1]
    case = {"shape": shape, "local": 2, "topk": 2, "tokens": [6] * size, "hidden": 8}
    case |= {"dtype": "fp32", "chunks": None, "skew": 3.0, "dropped": 0.0, "seed": 1, "pad": True}
    for difference in ranks(compare, case):
        assert difference is None or max(difference.values()) <= 1, difference


def test_padding_for_quantization_fills_up_each_expert(ranks):
    """Every expert's rows are a multiple of 16; those that fill up are nobody's."""
    case = {"shape": (2, 2), "local": 3, "topk": 3, "tokens": [9, 0, 20, 2], "hidden": 8}
    case |= {"dtype": "fp32", "chunks": None, "skew": 3.0, "dropped": 0.0, "seed": 4, "align": 16}
    for difference in ranks(compare, case):
        assert difference is None or max(difference.values()) <= 1, difference


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_a_group_that_lies_unevenly_counts_as_one_node(ranks, shape):
    """Its ranks stand on nodes of three and of one, or alone among others."""
    case = {"shape": shape, "local": 2, "topk": 3, "tokens": [5, 0, 7, 2], "hidden": 8}
    case |= {"dtype": "fp32", "chunks": 2, "skew": 0.0, "dropped": 0.2, "seed": 3, "nodes": (3, 5)}
    for difference in ranks(compare, case):
        assert difference is None or max(difference.values()) <= 1, difference


# What the ranks do.


def group_of(case):
    """The expert group of the case: the first ranks. None on ranks outside it."""
    nodes, per_node = case["shape"]
    if not cpu.enabled():
        cpu.enable()
    # All ranks of the job stand on the nodes; those of the group on the first of them.
    names = tuple(Node(f"node{i}", per_node) for i in range(-(-RANKS // per_node)))
    spare = RANKS - nodes * per_node
    if spare % per_node:
        names = (*names[:nodes], Node("rest", spare))
    if "nodes" in case:
        names = [Node(f"node{i}", size) for i, size in enumerate(case["nodes"])]
    use(Cluster(tuple(names)))
    key = (*case["shape"], *case.get("nodes", ()))
    # Parts are cached by members, as a job has one cluster; here the same ranks have several.
    parts._made = _parts.setdefault(key, {})
    if key not in _groups:
        members = list(range(nodes * per_node))
        _groups[key] = dist.new_group(members, group_desc=f"EXPERT_{nodes}x{per_node}")
        alone = [dist.new_group([rank]) for rank in range(RANKS)]
        _groups[key, "alone"] = alone[dist.get_rank()]
    if dist.get_rank() >= nodes * per_node:
        return None
    return SimpleNamespace(ep=_groups[key], tp_ep=_groups[key], expt_tp=_groups[key, "alone"])


def config_of(case):
    nodes, per_node = case["shape"]
    return SimpleNamespace(
        num_moe_experts=nodes * per_node * case["local"],
        moe_router_topk=case["topk"],
        moe_permute_fusion=False,
        moe_pad_expert_input_to_capacity=case.get("pad", False),
        moe_expert_capacity_factor=1.0 if case["dropped"] or case.get("pad") else None,
        moe_router_padding_for_quantization="align" in case,
        use_transformer_engine_op_fuser=False,
        fp8="e4m3",
        fp8_recipe="delayed",
        fp4=None,
        overlap_moe_expert_parallel_comm=False,
        cuda_graph_impl="none",
        cuda_graph_modules=[],
        moe_shared_expert_overlap=False,
    )


def made(case, pg, hierarchical):
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.efa.expert.dispatcher import HierarchicalTokenDispatcher

    first = pg.ep.rank() * case["local"]
    kind = HierarchicalTokenDispatcher if hierarchical else MoEAlltoAllTokenDispatcher
    experts = list(range(first, first + case["local"]))
    dispatcher = kind(case["local"], experts, config_of(case), pg)
    if hierarchical:
        shape = (1, pg.ep.size()) if "nodes" in case else case["shape"]
        assert (dispatcher.place.nodes, dispatcher.place.per_node) == shape
    if hierarchical:
        dispatcher.chunks = case["chunks"]
    return dispatcher


def routed(case, rank, extra=0):
    """(hidden [T, 1, H] fp32 with values of the case's dtype, map bool [T, E], probs [T, E])."""
    config, tokens = config_of(case), case["tokens"][rank]
    random = torch.Generator().manual_seed(100 * case["seed"] + rank)
    experts = config.num_moe_experts
    popular = torch.linspace(case["skew"], 0, experts)
    scores = torch.rand(tokens, experts, generator=random) + popular
    chosen = scores.topk(case["topk"] + extra).indices
    map_ = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    map_ &= torch.rand(tokens, experts, generator=random) >= case["dropped"]
    if case.get("pad"):  # as upstream's router: the same number of tokens for every expert
        capacity = -(-tokens * case["topk"] // experts)
        kept = (torch.rand(tokens, experts, generator=random) + map_).topk(capacity, dim=0).indices
        padded = torch.zeros_like(map_).scatter_(0, kept, True)
        probs = torch.rand(tokens, experts, generator=random) * (map_ & padded)
        map_ = padded
    else:
        probs = torch.rand(tokens, experts, generator=random) * map_
    hidden = torch.randn(tokens, 1, case["hidden"], generator=random)
    return hidden.to(DTYPES[case["dtype"]]).float(), map_, probs


def step(case, pg, hierarchical, dtype, magnitudes=False):
    """Outputs and gradients of dispatch, experts that scale and mix, and combine, in fp32."""
    rank, local = pg.ep.rank(), case["local"]
    hidden, map_, probs = routed(case, rank)
    grad = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    grad = grad.to(DTYPES[case["dtype"]]).to(dtype)
    scale = 1 + (rank * local + torch.arange(local).float()) / 7
    if magnitudes:
        hidden, grad = hidden.abs(), grad.abs()
    leaves = [hidden.to(dtype).requires_grad_(), probs.requires_grad_(), scale.requires_grad_()]
    hidden, probs, scale = leaves
    dispatcher = made(case, pg, hierarchical)
    rows, weights = dispatcher.dispatch_preprocess(hidden, map_, probs)
    rows, weights = dispatcher.token_dispatch(rows, weights)
    rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
    assert counts.dtype == torch.int64
    assert len(counts) == local
    assert int(counts.sum()) == len(rows) == len(weights)
    factor = scale.repeat_interleave(counts) * weights
    rows = (rows.float() * factor.unsqueeze(1)).to(dtype)
    output = dispatcher.combine_postprocess(
        dispatcher.token_combine(dispatcher.combine_preprocess(rows))
    )
    output.backward(grad)
    zeros = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    zeros[1] = zeros[1] * map_ * (probs != 0)  # fillers of weight 0 have no gradient that counts
    made_ = dict(zip(("tokens", "probabilities", "experts"), zeros, strict=True))
    return {"outputs": output.detach()} | made_, counts


def compare(rank, case):
    """By result: the largest error in units of what rounding allows. None outside the group."""
    pg = group_of(case)
    if pg is None:
        return None
    from megatron.efa.expert import settings as switches

    dtype = DTYPES[case["dtype"]]
    plain = {key: value for key, value in case.items() if key != "align"}
    theirs, their_counts = step(plain, pg, False, torch.float32)
    largest, _ = step(plain, pg, False, torch.float32, magnitudes=True)
    switches._fp8 = case.get("fp8", False)
    try:
        ours, counts = step(case, pg, True, dtype)
    finally:
        switches._fp8 = False
    if "align" in case:
        their_counts = -(-their_counts // case["align"]) * case["align"]
    assert torch.equal(counts, their_counts.cpu()), (counts, their_counts)
    unit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps / 2
    if case.get("fp8"):
        unit = max(unit, 1.5 * 2**-4)  # half a step of e4m3, and room for the scale
    least = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, 1e-11)
    return {
        name: float(
            ((ours[name].float() - theirs[name]).abs() / (unit * largest[name].abs() + least))
            .flatten()
            .max()
        )
        if theirs[name].numel()
        else 0.0
        for name in theirs
    }


def chunked_alike(rank, case):
    pg = group_of(case)
    if pg is None:
        return True
    dtype = DTYPES[case["dtype"]]
    results = [step(case | {"chunks": chunks}, pg, True, dtype)[0] for chunks in (1, 3)]
    return all(torch.equal(results[0][name], results[1][name]) for name in ("outputs", "tokens"))


def too_many(rank, case):
    pg = group_of(case)
    if pg is None:
        return ""
    dispatcher = made(case, pg, True)
    hidden, map_, probs = routed(case, rank, extra=1)
    with pytest.raises(EfaError) as refused:
        dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, map_, probs))
    return str(refused.value)
