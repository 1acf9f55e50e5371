"""Fit the time model's constants to published steps, and cross-validate them by group.

Constants are positive and fitted as logarithms with a Gaussian prior around a physical guess, by
Gauss-Newton on the logarithm of predicted over measured with Huber weights: a constant that the
rows
say nothing about keeps its guess.
"""

from dataclasses import dataclass, fields

import numpy as np

from megatron.efa.planner import time
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import Machine
from megatron.efa.planner.published import Run
from megatron.efa.planner.shape import Shape
from megatron.efa.planner.time import Conditions
from megatron.efa.planner.work import Work, measure

NOISE = 0.10
"""Standard deviation of log(predicted / measured) that one row is trusted to."""
HUBER = 1.5
"""In units of NOISE: rows farther off count linearly, not squared."""

PRIORS: dict[str, tuple[float, float]] = {
    # constant: (guess, relative standard deviation)
    "gemm_16": (0.70, 0.15),
    "gemm_low": (0.60, 0.15),
    "gemm_hopper": (0.95, 0.10),
    "expert_gemm": (0.80, 0.20),
    "attention": (0.50, 0.20),
    "memory": (0.70, 0.25),
    "permute": (1.0, 0.4),
    "scan": (1.0, 0.5),
    "near": (0.70, 0.10),
    "wire_alltoall": (0.60, 0.25),
    "wire_library": (0.75, 0.2),
    "proxy_rows": (4.0, 0.7),
    "proxy_v2": (0.3, 0.5),
    "exchange": (0.3, 0.8),
    "proxy_call": (1.0, 0.5),
    "overlap": (0.6, 0.3),
    "natural": (1.3, 0.25),
    "drop": (1.0, 0.1),
    "fsdp": (0.8, 0.2),
    "tp": (1.0, 0.3),
    "heads": (0.6, 0.4),
    "host_block": (1.5, 0.5),
    "host_moe": (4.0, 0.5),
    "host_v2": (1.5, 0.2),
    "host_send": (2.0, 0.7),
    "attention_ultra": (1.5, 0.2),
    "unfused": (2.0, 0.25),
    "fused": (0.7, 0.2),
    "weights": (0.5, 0.4),
    "indexer": (2.0, 0.5),
    "drop_host": (0.6, 0.3),
    "expert_rows": (300.0, 0.6),
    "fixed": (0.05, 0.5),
    "host_2025": (1.2, 0.4),
    "host_2026.02": (1.0, 0.4),
    "host_2026.04": (0.8, 0.4),
    "host_2026.06": (0.5, 0.5),
    "host_plain": (1.5, 0.5),
    "host_automodel": (1.0, 0.5),
    "host_proxy": (1.0, 0.5),
    "host_functional": (1.5, 0.5),
    "kernel_2025": (1.15, 0.12),
    "kernel_2026.02": (1.1, 0.12),
    "kernel_2026.04": (1.05, 0.1),
    "kernel_2026.06": (1.0, 0.001),
    "kernel_plain": (1.1, 0.12),
    "kernel_automodel": (1.2, 0.2),
    "kernel_proxy": (1.0, 0.12),
    "kernel_functional": (1.3, 0.25),
}
NAMES = tuple(PRIORS)
GUESS = np.log([PRIORS[name][0] for name in NAMES])
SPREAD = np.array([PRIORS[name][1] for name in NAMES])


def conditions(shape: Shape, job: Job, machine: Machine) -> Conditions:
    """What picks the constants of one run."""
    peaks = {"fp8": machine.fp8, "fp4": machine.fp8 * 1.3}
    peak = peaks.get(job.precision, machine.bf16)
    return Conditions(
        peak=peak,
        peak16=machine.bf16,
        memory_rate=machine.memory_rate,
        near=machine.near,
        far=machine.far,
        low=float(job.precision in ("fp8", "fp4")),
        hopper=float(machine.name.startswith("H")),
        ultra=float(machine.name.endswith("B300")),
        fused=float(_fused(shape, job, machine)),
        indexer=float(shape.indexer > 0),
        efa_v2=float(machine.fabric == "efa" and machine.old_host),
        alltoall=float(job.dispatcher in ("alltoall", "hierarchical") and job.ep > 1),
        proxy=float(job.dispatcher == "proxy" and job.ep > 1),
        overlap=float(job.ep_overlap),
        natural=float(job.natural),
        imbalance=job.imbalance,
        drop=float(job.drop),
        release=job.release,
    )


def _fused(shape: Shape, job: Job, machine: Machine) -> bool:
    """Transformer Engine's fused grouped MLP: MXFP8, gated, Blackwell, from 26.06 on."""
    blackwell = "B" in machine.name
    return blackwell and shape.gated and job.precision == "fp8" and job.release == "2026.06"


@dataclass(frozen=True)
class Table:
    """Runs as arrays: work, conditions and measured seconds."""

    work: Work
    conditions: Conditions
    seconds: np.ndarray

    def take(self, rows: np.ndarray) -> "Table":
        def part(of: object) -> dict:
            return {f.name: np.asarray(getattr(of, f.name))[rows] for f in fields(of)}

        return Table(
            Work(**part(self.work)), Conditions(**part(self.conditions)), self.seconds[rows]
        )


def table(runs: list[Run]) -> Table:
    """Stack runs for `fit` and `predict`."""
    works = [measure(run.shape, run.job, run.machine) for run in runs]
    held = [conditions(run.shape, run.job, run.machine) for run in runs]
    return Table(
        Work(**{f.name: np.array([getattr(w, f.name) for w in works]) for f in fields(Work)}),
        Conditions(
            **{f.name: np.array([getattr(c, f.name) for c in held]) for f in fields(Conditions)}
        ),
        np.array([run.seconds for run in runs]),
    )


def constants(logs: np.ndarray) -> dict[str, float]:
    return dict(zip(NAMES, np.exp(logs).tolist(), strict=True))


def predict(rows: Table, logs: np.ndarray) -> np.ndarray:
    """Seconds of each row."""
    return time.step(rows.work, rows.conditions, constants(logs))


def fit(rows: Table, start: np.ndarray | None = None, rounds: int = 25) -> np.ndarray:
    """Logarithms of the constants at the maximum of the posterior."""
    logs = GUESS.copy() if start is None else start.copy()
    measured = np.log(rows.seconds)
    best = _cost(rows, logs, measured)
    damping = 1e-2
    for _ in range(rounds):
        here = np.log(predict(rows, logs))
        off = here - measured
        slope = np.empty((len(off), len(logs)))
        for i in range(len(logs)):
            moved = logs.copy()
            moved[i] += 1e-4
            slope[:, i] = (np.log(predict(rows, moved)) - here) / 1e-4
        weight = np.minimum(1, HUBER * NOISE / np.maximum(np.abs(off), 1e-9)) / NOISE**2
        normal = slope.T @ (slope * weight[:, None]) + np.diag(SPREAD**-2)
        pull = slope.T @ (weight * off) + (logs - GUESS) / SPREAD**2
        for _ in range(8):
            moved = logs - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
            cost = _cost(rows, moved, measured)
            if cost < best:
                damping = max(damping / 5, 1e-6)
                break
            damping *= 5
        else:
            return logs
        gained, logs, best = best - cost, moved, cost
        if gained < 1e-3:
            return logs
    return logs


def _cost(rows: Table, logs: np.ndarray, measured: np.ndarray) -> float:
    off = np.abs(np.log(predict(rows, logs)) - measured) / NOISE
    if not np.all(np.isfinite(off)):
        return float("inf")
    near = off < HUBER
    data = np.where(near, off**2 / 2, HUBER * (off - HUBER / 2)).sum()
    return float(data + (((logs - GUESS) / SPREAD) ** 2).sum() / 2)


def cross_validate(runs: list[Run], hold: str = "group") -> tuple[np.ndarray, np.ndarray]:
    """(predictions of every run by constants fitted without its group, logs fitted to all).

    `hold`: what makes a group: `group` (model and GPU), `model` or `gpu`.
    """
    rows = table(runs)
    everything = fit(rows)
    keys = {"group": lambda run: run.group, "model": lambda run: run.shape.name}
    groups = [keys.get(hold, lambda run: run.machine.name)(run) for run in runs]
    out = np.empty(len(runs))
    for group in sorted(set(groups)):
        held = np.array([g == group for g in groups])
        logs = fit(rows.take(~held))
        out[held] = predict(rows.take(held), logs)
    return out, everything
