"""The doctor on one node, or as one process a node of a job."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.efa.doctor import registry
from megatron.efa.doctor.context import Context
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding

CHECKS: dict[str, str] = {}


@dataclass(frozen=True)
class Outcome:
    """What was found, and on how many nodes."""

    findings: list[Finding]
    title: str
    nodes: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of several nodes."""


def examine(
    host: Host, context: Context, args: argparse.Namespace, only: Sequence[str]
) -> Outcome | None:
    """All that is found, on the node that prints it; None on the others."""
    found = list(registry.examine(host, context, only=only))
    return Outcome(found, f"megatron-efa doctor: {host.kind or context.kind or 'this machine'}")
