"""With the hierarchical dispatcher, training gives upstream's losses and gradient norms."""

import pytest

from tests.parity.harness import MLA
from tests.parity.layouts import OVERLAP, RECOMPUTE, SHARED, TP, ep
from tests.parity.test_data_parallel import close

STEPS = 3
EIGHT = ["--num-experts", "8", "--moe-router-topk", "3"]
SIGMOID = ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
CAPACITY = ["--moe-expert-capacity-factor", "1.0"]
# name -> (ranks, ranks a node, flags)
LAYOUTS = {
    "two nodes, MLA, MTP, shared experts overlapped, chunks": (
        4,
        2,
        [
            *(*ep(4), *EIGHT, *MLA, *SHARED, *SIGMOID, *OVERLAP),
            *("--moe-shared-expert-overlap", "--mtp-num-layers", "1"),
        ],
    ),
    "experts of TP2": (4, 2, [*TP, *ep(2, etp=2), *EIGHT]),
    "padded to capacity": (
        4,
        2,
        [*ep(4), *EIGHT, *CAPACITY, "--moe-pad-expert-input-to-capacity"],
    ),
    "capacity, layer done twice": (4, 2, [*ep(4), *EIGHT, *CAPACITY, *RECOMPUTE, "moe"]),
    "one expert a rank, microbatches overlapped": (
        4,
        2,
        [*ep(4), "--bf16", "--overlap-moe-expert-parallel-comm"],
    ),
}
HIERARCHICAL = ["--moe-token-dispatcher-type", "hierarchical"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_upstream(ours, fork, name):
    ranks, per_node, flags = LAYOUTS[name]
    theirs = fork.run(ranks, flags, STEPS).checked()
    chunks = ["--efa-expert-chunks", "3"] if "chunks" in name else []
    two_level = ours.run(ranks, [*flags, *HIERARCHICAL, *chunks], STEPS, per_node=per_node)
    two_level.checked()
    assert f"> experts over {ranks // per_node} nodes" in two_level.logs[0]
    tolerance = 5e-3 if "--bf16" in flags else 1e-5
    assert close(two_level.losses, theirs.losses, tolerance)
    assert close(two_level.grad_norms, theirs.grad_norms, tolerance)


def test_a_run_goes_on_with_the_other_dispatcher(ours, fork, tmp_path):
    """Weights and optimizer states are the same in both."""
    flags = [*ep(4), *EIGHT, "--use-distributed-optimizer"]
    save = ["--save", str(tmp_path), "--save-interval", "1"]
    load = ["--load", str(tmp_path), "--ckpt-step", "1"]
    unbroken = fork.run(4, [*flags, *save], STEPS).checked()
    switched = ours.run(4, [*flags, *load, *HIERARCHICAL], STEPS, per_node=2).checked()
    assert len(switched.steps) == STEPS - 1
    assert close(switched.losses, unbroken.losses[1:], 1e-5)
    assert close(switched.grad_norms, unbroken.grad_norms[1:], 1e-5)
