"""With gradients and parameters on two levels, training gives upstream's losses and norms."""

import math

import pytest

from tests.parity.layouts import DISTRIBUTED, OVERLAP, ep

STEPS = 3
ON = ["--efa-data-parallel", "on"]
ACCUMULATED = [
    *("--bf16", "--grad-reduce-in-bf16", "--ddp-reduce-scatter-with-fp32-accumulation"),
]
# name -> (ranks, ranks a node, flags). Groups of experts' data parallelism span the nodes as well.
LAYOUTS = {
    "all-reduce": (4, 2, ["--overlap-grad-reduce"]),
    "experts, distributed optimizer, both overlaps": (8, 4, [*ep(2), *OVERLAP]),
    "mean in the collective": (4, 2, [*DISTRIBUTED, "--ddp-average-in-collective"]),
    "bf16 gradients, summed in fp32": (8, 4, [*ep(2), *OVERLAP, *ACCUMULATED]),
    "two instances of the optimizer": (
        8,
        2,
        [*ep(2), *OVERLAP, "--num-distributed-optimizer-instances", "2"],
    ),
}
SMALL_BUCKETS = ["--ddp-bucket-size", "20000", "--global-batch-size", "8"]


def close(ours, theirs, tolerance):
    return all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_as_upstream_on_two_levels(ours, plain, name):
    ranks, per_node, flags = LAYOUTS[name]
    flags = [*flags, *SMALL_BUCKETS]
    theirs = plain.run(ranks, flags, STEPS).checked()
    two_level = ours.run(ranks, [*flags, *ON], STEPS, per_node=per_node).checked()
    tolerance = 2e-3 if "--bf16" in flags else 1e-5
    assert close(two_level.losses, theirs.losses, tolerance)
    assert close(two_level.grad_norms, theirs.grad_norms, tolerance)
    assert f"> data parallelism over 2 nodes of {per_node} ranks" in two_level.logs[0]


def test_nodes_of_one_rank_train_to_upstreams_bits(ours, plain):
    """There is no second level, so all is left to upstream."""
    flags = [*OVERLAP, *SMALL_BUCKETS]
    theirs = plain.run(2, flags, STEPS).checked()
    assert ours.run(2, [*flags, *ON], STEPS, per_node=1).checked().bits == theirs.bits
