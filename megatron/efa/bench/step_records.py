"""Records of `bench step` from what its ranks saw, and how they are shown."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.efa.bench import report, routing, statistics
from megatron.efa.bench.step import Arm
from megatron.efa.bench.step_rank import Steps
from megatron.efa.errors import EfaError

Turn = list[Steps]
"""What each rank saw of one turn."""

TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Largest relative difference of the losses of a few steps that rounding explains."""


def step_seconds(turn: Turn, warm_up: int) -> list[float]:
    """Seconds of each step after the first `warm_up`: from one end on all ranks to the next."""
    ends = [max(times) for times in zip(*(rank.ends for rank in turn), strict=True)]
    return [b - a for a, b in zip(ends[warm_up - 1 :], ends[warm_up:], strict=False)]


def first_step(turn: Turn) -> float:
    """Seconds from the start of the last rank (imports done) to the end of the first step."""
    return max(rank.ends[0] for rank in turn) - max(rank.began for rank in turn)


def step_bytes(turn: Turn, warm_up: int) -> float | None:
    """Bytes between nodes a step, over the same steps; None where links are not counted."""
    counted = [rank.sent for rank in turn if rank.sent]
    if not counted:
        return None
    return sum((sent[-1] - sent[warm_up - 1]) / (len(sent) - warm_up) for sent in counted)


def losses(turn: Turn) -> list[float]:
    """Language-model loss of each step, from the last rank: it is in the last stage."""
    return [step["lm loss"] for step in turn[-1].losses]


def difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest relative difference; infinite if one is not a number or has other steps."""
    if len(a) != len(b):
        return float("inf")
    parts = [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]
    return max(parts) if all(part == part for part in parts) else float("inf")


def records_of(
    args: argparse.Namespace, arms: Sequence[Arm], seen: Sequence[Sequence[Turn]]
) -> list[dict[str, Any]]:
    """One record an arm; speed-up and losses are told against the first arm's."""
    dtype = "bf16" if "--bf16" in args.flags else "fp32"
    rounds = [
        [statistics.summary(step_seconds(turn, args.warm_up)).median for turn in turns]
        for turns in seen
    ]
    reference = losses(seen[0][0])
    records = []
    for arm, turns, seconds in zip(arms, seen, rounds, strict=True):
        ms = statistics.summary([s for t in turns for s in step_seconds(t, args.warm_up)])
        crossed = [step_bytes(turn, args.warm_up) for turn in turns]
        gain = statistics.ratio(rounds[0], seconds)
        off = max(difference(losses(turn), reference) for turn in turns)
        records.append(
            {
                "arm": arm.name,
                "flags": list(arm.flags),
                "nodes": args.nodes,
                "ranks_per_node": args.ranks_per_node,
                "backend": "nccl" if args.gpu else "gloo",
                "dtype": dtype,
                "rounds": args.rounds,
                "steps": args.steps,
                "ms": ms.median * 1e3,
                "ms_low": ms.low * 1e3,
                "ms_high": ms.high * 1e3,
                "first_step_s": statistics.summary([first_step(turn) for turn in turns]).median,
                "inter_node_bytes": None
                if None in crossed
                else round(statistics.summary(crossed).median),
                "speedup_vs_upstream": gain.median,
                "speedup_low": gain.low,
                "speedup_high": gain.high,
                "losses": losses(turns[0]),
                "loss_difference": off,
                "same_losses": off <= TOLERANCE[dtype],
            }
        )
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records as text."""
    header = ["paths that are on", "first step, s", "ms a step", "quartiles", "MB between nodes",
              "speedup", "last loss", "loss difference"]  # fmt: skip
    rows = []
    for r in records:
        crossed = "-" if r["inter_node_bytes"] is None else f"{r['inter_node_bytes'] / 1e6:.1f}"
        rows.append(
            [r["arm"], f"{r['first_step_s']:.1f}", f"{r['ms']:.0f}",
             f"{r['ms_low']:.0f} to {r['ms_high']:.0f}", crossed,
             f"{r['speedup_vs_upstream']:.2f}", f"{r['losses'][-1]:.4f}",
             f"{r['loss_difference']:.1e}"]
        )  # fmt: skip
    return report.table(header, rows)


def draw(pyplot: Any, records: Sequence[dict[str, Any]]) -> Any:
    """Time and bytes between nodes of one step, by arm."""
    figure, (time, size) = pyplot.subplots(
        1, 2, figsize=(max(8, 1.6 * len(records)), 4.5), layout="constrained"
    )
    names = [record["arm"].replace("+", "+\n") for record in records]
    middle = [record["ms"] for record in records]
    below = [record["ms"] - record["ms_low"] for record in records]
    above = [record["ms_high"] - record["ms"] for record in records]
    bars = time.bar(names, middle, yerr=[below, above], capsize=3, color="C0")
    time.bar_label(bars, [f"{r['speedup_vs_upstream']:.2f}x" for r in records], fontsize=8)
    time.set_ylabel("ms a step")
    if all(record["inter_node_bytes"] is not None for record in records):
        size.bar(names, [record["inter_node_bytes"] / 1e6 for record in records], color="C1")
    size.set_ylabel("MB between nodes a step")
    for axes in (time, size):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def save_routing(path: Path, turn: Turn) -> None:
    """Write the experts that the last MoE layer's router chose in the last step, on all ranks."""
    import torch

    layers = [max(rank.chosen) for rank in turn if rank.chosen]
    if not layers:
        raise EfaError(
            "--record-routing: no router gave every token as many experts as another: train a "
            "mixture of experts without capacity or padding"
        )
    chosen = torch.cat([r.chosen[max(layers)] for r in turn if max(layers) in r.chosen])
    routing.save(path, max(rank.experts for rank in turn), chosen)
