"""The zygote with `pretrain_gpt.py` as what its ranks run: `python -m tests.parity.ours`."""

import sys
from types import SimpleNamespace

import pretrain_gpt
from megatron.efa import entry
from tests.parity import zygote

preload_megatron = zygote.preload


def preload(plain):
    preload_megatron(plain)
    import megatron.efa.arguments
    import megatron.efa.gpt  # noqa: F401

    return SimpleNamespace(train=train)


def train():
    sys.exit(entry.run(pretrain_gpt.configure, pretrain_gpt.train, sys.argv[1:]))


if __name__ == "__main__":
    zygote.preload = preload
    zygote.main()
