"""Collectives that upstream calls by group go over two levels where a room has asked for it."""

import sys

import pytest
import torch
import torch.distributed as dist

from megatron.efa.cluster.current import use
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.comm import collectives, route
from tests.unit.gloo_ranks import GlooRanks


@pytest.fixture(autouse=True)
def nothing_asked():
    yield
    route._asked.clear()


@pytest.fixture
def asked(monkeypatch):
    """What upstream asks of `comm`, as (name, group); everything is sent there."""
    seen = []
    monkeypatch.setattr(route, "_way", lambda group, *tensors: (group, "on"))
    for name in ("all_reduce", "all_gather", "reduce_scatter"):

        def record(*args, name=name, **kwargs):
            seen.append((name, next(a for a in args if isinstance(a, Group))))

        monkeypatch.setattr(collectives, name, record)
    return seen


class Group:
    """Stands for a process group of two ranks."""

    def size(self):
        return 2

    def rank(self):
        return 0


def test_upstreams_tensor_parallel_layers_ask_here(asked):
    from megatron.core.tensor_parallel import layers, mappings

    group, rows = Group(), torch.ones(4, 2)
    mappings._reduce(rows, group)
    assert asked.pop() == ("all_reduce", group)
    for function, name in (
        (layers.dist_all_gather_func, "all_gather"),
        (mappings.dist_all_gather_func, "all_gather"),
        (layers.dist_reduce_scatter_func, "reduce_scatter"),
        (mappings.dist_reduce_scatter_func, "reduce_scatter"),
        (layers.torch.distributed.all_reduce, "all_reduce"),
    ):
        whole = (rows,) if name == "all_reduce" else (rows, rows)
        function(*whole, group=group)
        assert asked.pop() == (name, group)


def test_the_loss_and_what_finalizes_gradients_ask_here(asked):
    import megatron.core.distributed  # noqa: F401  (whose function of this name hides the module)
    from megatron.core.tensor_parallel import cross_entropy
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    group = Group()
    loss = cross_entropy._VocabParallelCrossEntropy
    loss.apply(torch.zeros(3, 1, 4), torch.zeros(3, 1, dtype=torch.int64), 0.0, group)
    assert asked == [("all_reduce", group)] * 3
    get_updated_expert_bias(torch.ones(1, 4), torch.zeros(1, 4), 1e-3, group)
    assert len(asked) == 4
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    finalize.torch.distributed.all_reduce(torch.ones(1), group=group)
    assert len(asked) == 5


def test_nothing_else_of_torch_is_changed():
    assert route.proxy.Tensor is torch.Tensor
    assert route.proxy.distributed.ReduceOp is dist.ReduceOp
    assert route.proxy.distributed.broadcast is dist.broadcast


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = GlooRanks(4, tmp_path_factory.mktemp("store"))
    yield pool
    pool.close()


def on_each(rank):
    use(Cluster((Node("a", 2), Node("b", 2))))
    tp = dist.new_group(list(range(4)), group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    dp = dist.new_group(list(range(4)), group_desc="DATA_PARALLEL_GROUP")
    counted = []
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        real = getattr(collectives, name)

        def counting(*args, real=real, name=name, **kwargs):
            counted.append(name)
            return real(*args, **kwargs)

        setattr(collectives, name, counting)
    mine = torch.arange(4.0) + rank
    whole = torch.arange(16.0) * (rank + 1)

    def results(group):
        reduced, gathered, part = mine.clone(), torch.empty(16), torch.empty(4)
        work = route.all_reduce(reduced, group=group, async_op=True)
        route.all_gather_into_tensor(gathered, mine, group=group)
        route.reduce_scatter_tensor(part, whole, group=group)
        work.wait()
        return reduced, gathered, part

    flat = results(tp)
    assert not counted
    route.send(("tp",), "on", "tp")
    two_level = results(tp)
    assert counted == ["all_reduce", "all_gather", "reduce_scatter"]
    results(dp)
    route.send(("tp",), "off", "tp")
    results(tp)
    assert len(counted) == 3
    return all(torch.equal(a, b) for a, b in zip(flat, two_level, strict=True))


def test_results_are_torchs_and_only_what_was_asked_for_is_sent(ranks):
    assert ranks(on_each) == [True] * 4
