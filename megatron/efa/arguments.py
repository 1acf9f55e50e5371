"""Megatron's argument parser with our own flags in it."""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.efa import cpu
from megatron.efa.config.nearest import hint
from megatron.efa.errors import EfaError

ENTRY_FLAGS = ("--config", "--print-config")
"""Read before Megatron's parser runs; in the parser so that `--help` shows them."""

NOT_IN_YAML = ("help", "config", "print_config", "yaml_cfg")
"""Arguments that a config may not set."""

ON_CPUS: dict[str, Any] = {
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
}
"""Defaults that end a run on a CPU (one in bf16, one with rope), and what takes their place.

Those that a CPU can follow (`--no-bias-swiglu-fusion`, ...) stay: they change the rounding."""


def add_efa_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser (its `extra_args_provider`), and return it.

    On CPUs, which have none of the fused kernels, the defaults become `ON_CPUS`.
    """
    if cpu.enabled():
        parser.set_defaults(**ON_CPUS)
    group = parser.add_argument_group(
        "Megatron-EFA", "docs/config.md; key=value words override YAML"
    )
    group.add_argument(
        "--config", metavar="FILE", help="YAML file whose keys become Megatron flags"
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="show the composed YAML and the flags it becomes, and exit",
    )
    group.add_argument(
        "--efa-cluster",
        metavar="FILE",
        help="description of the nodes and their network, the same file on all ranks "
        "(docs/cluster.md); default: MEGATRON_EFA_CLUSTER, else what torchrun says",
    )
    group.add_argument(
        "--efa-groups",
        action="store_true",
        help="process groups made by their members alone and connected before the first step "
        "(docs/groups.md)",
    )
    group.add_argument(
        "--efa-data-parallel",
        choices=("off", "auto", "on"),
        default="off",
        help="gradients and parameters of data parallelism in the node first, then along rails: "
        "where that is faster (auto), or wherever a group has both (on) (docs/data-parallel.md)",
    )
    group.add_argument(
        "--efa-expert-chunks",
        type=int,
        metavar="N",
        help="chunks in which the hierarchical dispatcher sends a layer's tokens, so that nodes "
        "and rails are busy at once; default by message size (docs/expert.md)",
    )
    group.add_argument(
        "--efa-dispatch-dtype",
        choices=("bf16", "fp8"),
        default="bf16",
        help="of tokens on the way to their experts with the hierarchical dispatcher: as they are "
        "(bf16), or e4m3 with a scale for 128 values (docs/expert.md)",
    )
    group.add_argument(
        "--efa-placement",
        choices=("off", "on"),
        default="off",
        help="give hosts the ranks between which the network is near, by permuting RANK before "
        "torch.distributed starts (docs/placement.md)",
    )
    group.add_argument(
        "--efa-tensor",
        choices=("off", "auto", "on"),
        default="off",
        help="collectives of tensor parallelism that spans nodes in the node first, then along "
        "rails: where that is faster (auto), or wherever it can be (on) (docs/paths.md)",
    )
    group.add_argument(
        "--efa-pipeline",
        choices=("off", "on"),
        default="off",
        help="a communicator for each neighbouring stage and direction, and activations that all "
        "tensor-parallel ranks hold sent once between nodes (docs/paths.md)",
    )
    group.add_argument(
        "--efa-traffic-interval",
        type=int,
        default=0,
        metavar="N",
        help="in every N-th step record what is sent and waited for, by parallel axis and tier: a "
        "table in the log, scalars in TensorBoard (docs/traffic.md)",
    )
    group.add_argument(
        "--efa-traffic-dir",
        metavar="DIR",
        help="write what is recorded to DIR/traffic.jsonl, for `megatron-efa traffic`",
    )
    group.add_argument(
        "--efa-traffic-trace",
        type=int,
        metavar="STEP",
        help="write each transfer and wait of this step to --efa-traffic-dir",
    )
    return parser


def build_parser() -> argparse.ArgumentParser:
    """Return upstream's parser with our flags; what it refuses it raises as an EfaError.

    Imports Megatron (about ten seconds): `cpu.enable()` must have run if it is to run at all.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser = _Parser(allow_abbrev=False, description="Megatron-LM arguments", formatter_class=_Help)
    add_megatron_arguments(parser)
    add_efa_arguments(parser)
    for action in parser._actions:
        if callable(action.type) and not isinstance(action.type, type):
            action.type = _refusing(action.type, action.choices)
    return parser


class _Help(argparse.HelpFormatter):
    """Takes help with a bare percent sign: 0.19.2 has one, on which its own `--help` fails."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, not several hundred lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise EfaError(message)

    def parse_args(self, args: list[str], namespace: None = None) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            if word.startswith("-"):
                raise EfaError(f"there is no flag {word}{hint(word, self._option_string_actions)}")
            raise EfaError(
                f"{unknown[0]!r} is neither a flag, nor the value of one, nor GROUP.KEY=VALUE "
                "with a group of docs/config.md"
            )
        return parsed


def _refusing(convert: Callable[[str], Any], choices: Any) -> Callable[[str], Any]:
    """Let argparse report what upstream's converters raise (an enum's raises KeyError)."""

    @functools.wraps(convert)
    def converter(text: str) -> Any:
        try:
            return convert(text)
        except Exception as error:
            names = [choice.name for choice in choices or () if hasattr(choice, "name")]
            among = f" (one of {', '.join(names)}{hint(text, names)})" if names else ""
            raise argparse.ArgumentTypeError(f"invalid value {text!r}{among}") from error

    return converter
