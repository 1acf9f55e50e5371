"""With groups made by their members alone, training gives upstream's bits."""

import pytest

from tests.parity.layouts import LAYOUTS

STEPS = 3
# Unequal numbers of groups a rank (embeddings at both ends of a pipeline) come before groups that
# span the stages; and optimizer instances add groups in two levels of upstream's own.
NAMES = ["PP2 x EP2", "ETP2 x EP2", "EP2, two instances of the distributed optimizer, overlaps"]


@pytest.mark.parametrize("name", NAMES)
def test_trains_to_the_same_bits_with_our_groups(ours, plain, name):
    ranks, flags = LAYOUTS[name]
    with_ours = ours.run(ranks, [*flags, "--efa-groups"], STEPS, per_node=2).checked()
    assert with_ours.bits == plain.run(ranks, flags, STEPS).checked().bits
    assert "groups of rank 0" in with_ours.logs[0]
    assert "2 nodes, from torchrun" in with_ours.logs[0]


def test_a_misspelt_group_in_the_communicator_config_is_a_sentence(ours, tmp_path):
    config = tmp_path / "nccl.yaml"
    config.write_text("ep_rial: {traffic_class: 3}\n")
    flags = ["--efa-groups", "--nccl-communicator-config-path", str(config)]
    run = ours.run(1, flags, steps=1)
    assert run.codes == [2]
    assert "there is no group 'ep_rial'; did you mean ep_rail?" in run.logs[0]
