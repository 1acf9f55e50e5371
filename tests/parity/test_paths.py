"""Tensor parallelism over two levels, and all paths together, train as upstream does."""

import pytest

from tests.parity.layouts import OVERLAP, TP, ep, pp
from tests.parity.test_data_parallel import close

STEPS = 3
ALL = [
    *("--efa-groups", "--efa-data-parallel", "on", "--efa-pipeline", "on", "--efa-tensor", "on"),
    *("--moe-token-dispatcher-type", "hierarchical"),
]
TENSOR = ["--efa-tensor", "on"]
TP4 = ["--tensor-model-parallel-size", "4"]
QK = ["--qk-layernorm"]
EXPERTS = ["--num-experts", "8", "--moe-router-topk", "3", "--moe-router-dtype", "fp32"]
BIAS = ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
# name -> (ranks, ranks a node, flags, switches)
LAYOUTS = {
    "TP4 + SP over two nodes, norms' gradients": (4, 2, [*TP4, TP[-1], *QK], TENSOR),
    "all: PP2 x EP4 on four nodes": (
        8,
        2,
        [*pp(2), *ep(4), *EXPERTS, *BIAS, *OVERLAP, "--global-batch-size", "8"],
        ALL,
    ),
    "all: TP4 + SP x EP8 on four nodes": (
        8,
        2,
        [*TP4, TP[-1], *ep(8), *EXPERTS, *OVERLAP, "--global-batch-size", "8"],
        ALL,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_upstream(ours, fork, name):
    ranks, per_node, flags, switches = LAYOUTS[name]
    theirs = fork.run(ranks, flags, STEPS).checked()
    run = ours.run(ranks, [*flags, *switches], STEPS, per_node=per_node).checked()
    assert close(run.losses, theirs.losses, 1e-5)
    assert close(run.grad_norms, theirs.grad_norms, 1e-5)
    if "TP4" in name:
        assert "> tensor parallelism over 2 nodes of 2 ranks" in run.logs[0]


def test_tensor_parallelism_inside_a_node_trains_to_upstreams_bits(ours, fork):
    flags = [*TP, *ep(2)]
    theirs = fork.run(4, flags, STEPS).checked()
    assert ours.run(4, [*flags, *TENSOR], STEPS, per_node=2).checked().bits == theirs.bits
