"""Bytes of one rank."""

from argparse import Namespace


def state_bytes(
    dense: int, expert: int, dense_group: int, expert_group: int, args: Namespace
) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) bytes of `dense` and `expert` parameters on one rank."""
    return 0, 0, 0
