"""One model, one seed, any layout: the losses agree.

Upstream draws initial weights from generators seeded by tensor, pipeline and expert rank, so each
layout starts from other weights. What makes them agree is a checkpoint of one rank that every
layout loads with --finetune, without optimizer and generator state, and a padded vocabulary that
does not depend on the tensor-parallel size.
"""

import pytest

from tests.parity.harness import MLA, MOE
from tests.parity.layouts import DISTRIBUTED, OVERLAP, SHARED, TP, pp

STEPS = 20
MODELS = {
    "mixtral": ["--num-layers", "4", *MOE, "--moe-aux-loss-coeff", "1e-2"],
    "deepseek": [
        *("--num-layers", "4", *MOE, *MLA, *SHARED, "--mtp-num-layers", "1"),
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
        *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "1e-2"),
    ],
}
EP2 = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
EP4 = ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
ETP2_EP2 = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "2"]
LAYOUTS = {
    "mixtral": {
        "DP2, distributed optimizer": (2, OVERLAP),
        "PP2": (2, pp(2)),
        "PP2, virtual stages": (2, pp(2, 1)),
        "TP2 + SP": (2, TP),
        "EP2": (2, EP2),
        "EP4": (4, EP4),
        "PP2 x EP2": (4, [*pp(2), *EP2]),
        "ETP2 x EP2": (4, ETP2_EP2),
        "TP2 + SP x EP2, distributed optimizer": (4, [*TP, *EP2, *DISTRIBUTED]),
    },
    "deepseek": {
        "TP2 + SP x EP2": (2, [*TP, *EP2]),
        "PP2 x EP2": (4, [*pp(2), *EP2]),
        "EP4, distributed optimizer": (4, [*EP4, *DISTRIBUTED]),
    },
}
CASES = [(model, layout) for model in LAYOUTS for layout in LAYOUTS[model]]


@pytest.fixture(scope="module")
def weights(fork, tmp_path_factory):
    """Model -> flags that load its weights, written by one rank before anything was learnt."""

    def written(model):
        path = str(tmp_path_factory.mktemp(model))
        save = ["--save", path, "--save-interval", "1", "--no-save-optim", "--no-save-rng"]
        still = ["--lr", "0", "--min-lr", "0"]
        fork.run(1, [*MODELS[model], *save, *still], steps=1).checked()
        return ["--load", path, "--finetune", "--no-load-optim", "--no-load-rng"]

    return {model: written(model) for model in MODELS}


@pytest.fixture(scope="module")
def one_rank(fork, weights):
    return {m: fork.run(1, [*MODELS[m], *weights[m]], steps=STEPS).checked() for m in MODELS}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_losses_agree_with_those_of_one_rank(fork, weights, one_rank, model, layout):
    ranks, flags = LAYOUTS[model][layout]
    run = fork.run(ranks, [*MODELS[model], *weights[model], *flags], steps=STEPS).checked()
    assert run.losses == pytest.approx(one_rank[model].losses, rel=1e-4)
    assert run.grad_norms == pytest.approx(one_rank[model].grad_norms, rel=1e-2)
    assert run.losses[-1] < run.losses[0] - 0.3


def test_without_common_weights_layouts_differ(fork, one_rank):
    """The reason for the checkpoint: were it not needed, this module should do without."""
    run = fork.run(2, [*MODELS["mixtral"], *EP2], steps=1).checked()
    assert run.losses[0] != pytest.approx(one_rank["mixtral"].losses[0], rel=1e-5)
