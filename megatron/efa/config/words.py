"""Which words of a command line are ours, and which are Megatron's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.efa.errors import EfaError

GROUPS = ("model", "parallel", "data", "train", "cluster", "efa")
"""The groups of a config. They are for the reader: a key may stand in any one of them."""
LAUNCH = "launch"
"""One more group, for `megatron-efa launch`; its keys are no arguments of Megatron's."""

_ANY = "|".join((*GROUPS, LAUNCH))
# `model.num_layers=4`, `+model.num_layers=4`, `~model.num_layers`, `model=deepseek_tiny`
_OVERRIDE = re.compile(rf"(\+\+|\+)?({_ANY})(\.[^=]*)?=.*|~({_ANY})\b.*", re.S)


@dataclass
class Words:
    """A command line, taken apart."""

    config: str | None = None
    print_config: bool = False
    overrides: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)


def split(argv: Sequence[str]) -> Words:
    """Take `--config`, `--print-config` and the overrides out of `argv`; the rest is Megatron's.

    An override is known by its group, wherever it stands, so that it may follow a flag that takes a
    list. Raises EfaError when `--config` lacks its file or comes twice.
    """
    words = Words()
    rest = iter(argv)
    for word in rest:
        if word == "--config" or word.startswith("--config="):
            file = word.partition("=")[2] if "=" in word else next(rest, "")
            if not file or file.startswith("--"):
                raise EfaError("--config needs the path of a YAML file behind it")
            if words.config is not None:
                raise EfaError(
                    f"--config is given twice ({words.config} and {file}): let one file name the "
                    "other in its defaults list"
                )
            words.config = file
        elif word == "--print-config":
            words.print_config = True
        elif _OVERRIDE.fullmatch(word):
            words.overrides.append(word)
        else:
            words.flags.append(word)
    return words
