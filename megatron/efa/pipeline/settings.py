"""The switch `--efa-pipeline`."""

from argparse import Namespace

_on = False


def configure(args: Namespace) -> None:
    """Do from now on as Megatron's `args` say."""
    global _on
    _on = getattr(args, "efa_pipeline", "off") == "on"


def on() -> bool:
    return _on
