"""Dispatchers that are wrong in one place, beside upstream's on two ranks: what is told of each.

python disagree.py LOGS
"""

import multiprocessing
import sys
from pathlib import Path

from megatron.efa import cpu
from megatron.efa.errors import EfaError

cpu.enable()

from megatron.efa.bench import dispatchers, routing  # noqa: E402
from megatron.efa.bench.expert_rank import Case, measure  # noqa: E402
from megatron.efa.emulate.cluster import EmulatedCluster  # noqa: E402
from megatron.efa.emulate.forked import run_forked  # noqa: E402

MUTATIONS = {
    "nothing": lambda rows, probs: (rows, probs),
    "rows": lambda rows, probs: (rows.roll(1, 0), probs),
    "probs": lambda rows, probs: (rows, probs.roll(1, 0)),
    "gradient": lambda rows, probs: (rows, probs.detach()),
}
build = dispatchers.build


def build_mutated(arm, *words):
    """Upstream's dispatcher, changed as the arm's name says."""
    dispatcher = build(dispatchers.Arm("alltoall"), *words)
    dispatch, mutate = dispatcher.token_dispatch, MUTATIONS.get(arm.dispatcher)
    if mutate is not None:
        dispatcher.token_dispatch = lambda *given: mutate(*dispatch(*given))
    return dispatcher


def main():
    dispatchers.build = build_mutated
    case = Case(routing.Layer("x", 8, 2), "uniform", None, 32, 16, "fp32")
    for mutation in MUTATIONS:
        arms = [dispatchers.Arm("alltoall"), dispatchers.Arm(mutation)]
        meet = multiprocessing.get_context("fork").Barrier(2)
        with EmulatedCluster(2, isolated=False) as cluster:
            try:
                run_forked(
                    cluster,
                    1,
                    lambda arms=arms, meet=meet: measure([case], arms, 1, 2, False, False, meet),
                    Path(sys.argv[1]) / mutation,
                )
                print(mutation, "measured")
            except EfaError as error:
                print(mutation, str(error).replace("\n", " "))


main()
