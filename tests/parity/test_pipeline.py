"""Over our wires between pipeline stages, training gives upstream's bits: no sum is in them."""

import pytest

from tests.parity.harness import MOE
from tests.parity.layouts import DISTRIBUTED, ep, pp

STEPS = 3
ON = ["--efa-pipeline", "on"]
EVALUATION = ["--eval-iters", "2", "--eval-interval", "2"]
DENSE_TP = ["--tensor-model-parallel-size", "2"]
# name -> (ranks, ranks a node, flags)
LAYOUTS = {
    "PP2, evaluation": (2, 1, [*pp(2), *EVALUATION]),
    "PP4, virtual stages": (
        4,
        2,
        [*pp(4, 1), "--num-layers", "8", "--overlap-p2p-communication-warmup-flush"],
    ),
    "PP2 x EP2": (4, 2, [*pp(2), *ep(2), *DISTRIBUTED]),
    "MTP, PP2, bf16": (2, 1, [*MOE, *pp(2), "--mtp-num-layers", "1", "--bf16"]),
    "PP2 x TP2, virtual stages, slices, bf16": (
        4,
        2,
        [*pp(2, 1), *DENSE_TP, "--num-layers", "4", "--bf16"],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_to_upstreams_bits(ours, plain, name):
    ranks, per_node, flags = LAYOUTS[name]
    theirs = plain.run(ranks, flags, STEPS).checked()
    run = ours.run(ranks, [*flags, *ON], STEPS, per_node=per_node).checked()
    assert run.bits == theirs.bits
    assert "> pipeline of" in run.logs[0]
    assert (", 2 slices of each message" in run.logs[0]) == ("slices" in name)
