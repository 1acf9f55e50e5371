"""torch_dist checkpoints: a resumed run repeats the unbroken one, in any layout."""

import pytest

from tests.parity.harness import MLA
from tests.parity.layouts import DISTRIBUTED, OVERLAP, TP, ep, pp

STEPS, BREAK = 6, 3
DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
RESHAPABLE = [*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"]
RUNS = {
    "EP2, fp32": (2, [*ep(2), *DISTRIBUTED]),
    "EP2, bf16, overlaps": (2, [*ep(2), *OVERLAP, "--bf16"]),
    "TP2 + SP x EP2, MLA, dropout": (2, [*TP, *ep(2), *MLA, *DISTRIBUTED, *DROPOUT]),
    "PP2, dropout, data loader workers": (2, [*pp(2), *DROPOUT, "--num-workers", "1"]),
    "EP2, without distributed optimizer": (2, ep(2)),
}
OTHER_LAYOUTS = {
    "PP2 x EP2": (4, [*pp(2), *ep(2)]),
    "EP4": (4, ep(4)),
    "TP2 + SP x EP2": (2, [*TP, *ep(2)]),
}


def save_and_go_on(fork, ranks, flags, path):
    """The unbroken run, which leaves a checkpoint of step BREAK behind."""
    save = ["--save", str(path), "--save-interval", str(BREAK)]
    return fork.run(ranks, [*flags, *save], steps=STEPS).checked()


def resume(fork, ranks, flags, path):
    load = ["--load", str(path), "--ckpt-step", str(BREAK)]
    return fork.run(ranks, [*flags, *load], steps=STEPS).checked()


@pytest.mark.parametrize("name", RUNS)
def test_resume_repeats_the_unbroken_run(fork, tmp_path, name):
    unbroken = save_and_go_on(fork, *RUNS[name], tmp_path)
    resumed = resume(fork, *RUNS[name], tmp_path)
    assert len(resumed.steps) == STEPS - BREAK
    assert resumed.bits == unbroken.bits[BREAK:]


@pytest.fixture(scope="module")
def reshapable(fork, tmp_path_factory):
    path = tmp_path_factory.mktemp("reshapable")
    return path, save_and_go_on(fork, 2, [*ep(2), *RESHAPABLE], path)


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_resume_in_another_layout_agrees(fork, reshapable, name):
    path, unbroken = reshapable
    ranks, flags = OTHER_LAYOUTS[name]
    resumed = resume(fork, ranks, [*flags, *RESHAPABLE], path)
    assert resumed.losses == pytest.approx(unbroken.losses[BREAK:], rel=1e-5)
    assert resumed.grad_norms == pytest.approx(unbroken.grad_norms[BREAK:], rel=1e-4)


def test_upstream_cannot_resume(plain, tmp_path):
    """The reason for our Adam: without it the checkpoint does not load."""
    ranks, flags = RUNS["EP2, fp32"]
    save_and_go_on(plain, ranks, flags, tmp_path)
    load = ["--load", str(tmp_path), "--ckpt-step", str(BREAK)]
    run = plain.run(ranks, [*flags, *load], steps=STEPS)
    assert not run.ok
    assert "distrib_optimizer.py" in run.tail()
