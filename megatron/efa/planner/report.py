"""Errors of predicted steps, as text and as figures: overall, by hardware, by model, the worst
rows."""

from dataclasses import dataclass

import numpy as np

from megatron.efa.errors import EfaError
from megatron.efa.planner import published
from megatron.efa.planner.published import Run


@dataclass(frozen=True)
class Rows:
    """A file's rows: those that the planner can predict, and why it cannot the others."""

    runs: list[Run]
    numbers: list[int]
    """Line of each run among the file's rows, from 1."""
    refused: list[tuple[int, str, str]]
    """(row, model, why)."""


def sort_rows(rows: list[dict[str, str]]) -> Rows:
    """Parse every row; a row that cannot be predicted never stops the others."""
    runs, numbers, refused = [], [], []
    for number, row in enumerate(rows, 1):
        try:
            runs.append(published.parse(row))
            numbers.append(number)
        except EfaError as error:
            refused.append((number, row.get("model", ""), str(error)))
    return Rows(runs, numbers, refused)


def summary(rows: Rows, predicted: np.ndarray) -> dict:
    """median_abs_error, p90_abs_error (fractions; null if none measured), rows, not_predicted."""
    errors = _errors(rows, predicted)
    measured = errors[np.isfinite(errors)]
    return {
        "median_abs_error": float(np.median(measured)) if len(measured) else None,
        "p90_abs_error": float(np.quantile(measured, 0.9)) if len(measured) else None,
        "rows": len(rows.runs) + len(rows.refused),
        "not_predicted": len(rows.refused),
    }


def _errors(rows: Rows, predicted: np.ndarray) -> np.ndarray:
    seconds = np.array([run.seconds for run in rows.runs])
    return np.abs(predicted / seconds - 1) if len(seconds) else np.zeros(0)


def table(rows: Rows, predicted: np.ndarray) -> str:
    """Each row's prediction and error, then the rows without one and why."""
    lines = [
        f"{'row':>4} {'model':<24} {'gpu':<6} {'gpus':>5} {'measured s':>11} "
        f"{'predicted s':>12}  error"
    ]
    for number, run, seconds in zip(rows.numbers, rows.runs, predicted, strict=True):
        error = (
            f"{seconds / run.seconds - 1:+6.1%}" if np.isfinite(run.seconds) else "  (no step time)"
        )
        lines.append(
            f"{number:>4} {run.shape.name:<24} {run.machine.name:<6} {run.job.gpus:>5} "
            f"{run.seconds:>11.3f} {seconds:>12.3f} {error}"
        )
    lines += [f"{number:>4} {model}: not predicted: {why}" for number, model, why in rows.refused]
    return "\n".join(lines)


def digest(rows: Rows, predicted: np.ndarray, worst: int = 10) -> str:
    """Medians and 90th percentiles overall, by hardware, by model, dense rows; the worst rows."""
    errors = _errors(rows, predicted)
    kinds: dict[str, list[int]] = {"all": list(range(len(rows.runs)))}
    for i, run in enumerate(rows.runs):
        kinds.setdefault(f"gpu {run.machine.name}", []).append(i)
        kinds.setdefault(f"model {run.shape.name}", []).append(i)
        kinds.setdefault("EFA" if run.machine.fabric == "efa" else "not EFA", []).append(i)
        kinds.setdefault("experts" if run.shape.experts else "dense", []).append(i)
    lines = [f"{'':<30} {'rows':>5} {'median':>7} {'90 %':>7}  median of predicted/measured"]
    seconds = np.array([run.seconds for run in rows.runs])
    for kind in sorted(kinds, key=lambda name: (name != "all", name)):
        picked = [i for i in kinds[kind] if np.isfinite(errors[i])]
        if picked:
            ratio = np.median(predicted[picked] / seconds[picked])
            lines.append(
                f"{kind:<30} {len(picked):>5} {np.median(errors[picked]):>7.1%} "
                f"{np.quantile(errors[picked], 0.9):>7.1%}  {ratio:.2f}"
            )
    order = [i for i in np.argsort(-np.nan_to_num(errors, nan=-1)) if np.isfinite(errors[i])]
    lines.append(f"worst {min(worst, len(order))}:")
    for i in order[:worst]:
        run = rows.runs[i]
        job = run.job
        lines.append(
            f"  row {rows.numbers[i]}: {run.shape.name} on {job.gpus} {run.machine.name}, "
            f"tp{job.tp} pp{job.pp} ep{job.ep} mbs{job.mbs} {job.precision} {job.dispatcher}, "
            f"release {job.release}: predicted {predicted[i]:.2f} s, measured {run.seconds:.2f} s"
        )
    return "\n".join(lines)
