"""Published peaks of memory beside the planner's: rows of published_steps.csv whose notes say one.

What a row leaves open is filled by rule, not by fit: SimuMax splits layers evenly over stages; the
Nemotron recipes keep Adam's moments in bf16 and, where they say so, the inputs of experts' first
GEMMs on the host. A row that gives a whole device's use is told apart by `why`.
"""

import re
from dataclasses import dataclass

from megatron.efa.errors import EfaError
from megatron.efa.planner import memory, published
from megatron.efa.planner.memory import GIB, States
from megatron.efa.planner.published import Run

_PEAK = re.compile(r"PEAK [A-Z]*[ <]*([\d.,]+) (GiB|GB|MiB)(?: \(([\d.]+) GiB)?")


@dataclass(frozen=True)
class Peak:
    """One published peak; GiB."""

    row: int
    run: Run
    published: float
    predicted: float
    """Live bytes of the fullest stage, as PyTorch's allocator counts them."""
    why: str
    """Why the row says nothing of the model; empty if it does."""

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def peaks(rows: list[dict[str, str]]) -> list[Peak]:
    """The peaks that `rows` state, each layout once."""
    found: dict[tuple, Peak] = {}
    for number, row in enumerate(rows, 1):
        said = _PEAK.search(row.get("notes", ""))
        if not said:
            continue
        try:
            run = published.parse(row)
        except EfaError:
            continue
        job = run.job
        key = (run.shape.name, job.pp, job.ep, job.recompute, job.dispatcher, said.group(1))
        found.setdefault(key, Peak(number, run, _gib(said), _allocated(run, row), _why(run, said)))
    return list(found.values())


def _gib(said: re.Match) -> float:
    if said.group(3):
        return float(said.group(3))
    units = {"GiB": 1.0, "GB": 1e9 / GIB, "MiB": 1 / 1024}
    return float(said.group(1).replace(",", "")) * units[said.group(2)]


def _why(run: Run, said: re.Match) -> str:
    if said.group(2) == "MiB":
        return "use of the whole device, recomputation not stated"
    return ""


def _allocated(run: Run, row: dict[str, str]) -> float:
    """GiB live at the fullest moment of the fullest stage."""
    shape, job = run.shape, run.job
    half = 2 if "nemotron" in shape.name else job.moment_bytes
    kept = States(gradient=job.grad_bytes, moments=2 * half)
    sizes = []
    for stage in range(job.pp):
        used = memory.usage(shape, job, stage, kept, _even(run, row, stage))
        live = used.total - used.overhead
        sizes.append(live - _offloaded(run))
    return max(sizes) / GIB


def _even(run: Run, row: dict[str, str], stage: int) -> tuple[int, int] | None:
    if "SimuMax" not in row["source"]:
        return None
    layers = run.shape.layers // run.job.pp
    dense = min(max(run.shape.dense - stage * layers, 0), layers)
    return dense, layers - dense


def _offloaded(run: Run) -> float:
    if run.shape.name != "nemotron-3.5-lightning":  # "expert-FC1 offload"
        return 0.0
    shape, job = run.shape, run.job
    return (shape.moe + shape.mtp) * shape.topk * 2 * shape.expert_width * job.tokens


def table(found: list[Peak]) -> str:
    """As Markdown."""
    lines = ["| model, layout | published GiB | planner GiB | error |", "| --- | --- | --- | --- |"]
    for peak in found:
        job, shape = peak.run.job, peak.run.shape
        layers = f" ({shape.layers} layers)" if "4-layer" in peak.run.row["model"] else ""
        recompute = "+".join(sorted(job.recompute)) or "none"
        error = peak.why or f"{peak.error:+.1%}"
        lines.append(
            f"| {shape.name}{layers}, {job.gpus} {peak.run.machine.name}, pp{job.pp} ep{job.ep} "
            f"{job.dispatcher}, recompute {recompute} | {peak.published:.1f} | "
            f"{peak.predicted:.1f} | {error} |"
        )
    return "\n".join(lines)
