"""One process for each tree of Megatron, shared by all tests; it forks the ranks."""

import os
from pathlib import Path

import pytest

from tests.parity.harness import OurTrainer, Trainer


@pytest.fixture(scope="session")
def fork(tmp_path_factory):
    """Trains on the fork: upstream with our patches, as it lies in this checkout."""
    trainer = Trainer(tmp_path_factory.mktemp("fork"))
    yield trainer
    trainer.close()


@pytest.fixture(scope="session")
def ours(tmp_path_factory):
    """Trains on the fork through `pretrain_gpt.py`, which knows our flags."""
    trainer = OurTrainer(tmp_path_factory.mktemp("ours"))
    yield trainer
    trainer.close()


@pytest.fixture(scope="session")
def plain_tree(tmp_path_factory):
    """Upstream's own release, unpatched. MEGATRON_EFA_PLAIN names a directory that has it."""
    if given := os.environ.get("MEGATRON_EFA_PLAIN"):
        return Path(given)
    from megatron.efa.fork.layout import Layout
    from megatron.efa.fork.wheel import obtain

    pin, tree = Layout.of_this_checkout().pin(), tmp_path_factory.mktemp("plain")
    for name, data in obtain(pin, pin.version).files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tree


@pytest.fixture(scope="session")
def plain(plain_tree, tmp_path_factory):
    """Trains on plain upstream under the same CPU redirection."""
    trainer = Trainer(tmp_path_factory.mktemp("plain_runs"), plain_tree)
    yield trainer
    trainer.close()
