"""Every layout trains on CPUs, and where upstream trains too, we train to the same bit."""

import math

import pytest

from tests.parity.layouts import LAYOUTS, UPSTREAM_REFUSES

STEPS = 20
each_layout = pytest.mark.parametrize("name", LAYOUTS)


@each_layout
def test_trains(fork, name):
    run = fork.run(*LAYOUTS[name], steps=STEPS).checked()
    assert len(run.steps) == STEPS
    assert run.losses[-1] < run.losses[0] - 0.3
    assert all(math.isfinite(norm) and norm > 0 for norm in run.grad_norms)
    assert not any(step["skipped"] for step in run.steps)


@each_layout
def test_same_bits_as_upstream(fork, plain, name):
    upstream = plain.run(*LAYOUTS[name], steps=STEPS)
    if name in UPSTREAM_REFUSES:
        assert not upstream.ok, "upstream trains this now: take it out of UPSTREAM_REFUSES"
        assert UPSTREAM_REFUSES[name] in upstream.tail()
    else:
        assert fork.run(*LAYOUTS[name], steps=STEPS).checked().bits == upstream.checked().bits
