"""All legal layouts of a model on a cluster: pruned by memory, ranked by step time.

Legal is what Megatron 0.19 takes: sizes that divide, virtual stages only with pipeline stages,
`overlap_moe_expert_parallel_comm` only with virtual stages (or one stage) and without full
recomputation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from megatron.efa.errors import EfaError
from megatron.efa.planner import constants, fit, measured, memory, time
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import MACHINES, Machine
from megatron.efa.planner.pipeline import slots
from megatron.efa.planner.published import Run
from megatron.efa.planner.shape import Shape

RESERVE = 0.03
"""Share of the GPU's memory left free."""

_EFFORT = 40_000
"""Layouts that a search looks at before it asks to be narrowed."""


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted step."""

    job: Job
    seconds: float
    parts: dict[str, float]
    """Seconds by cause; they sum to `seconds`."""
    usage: memory.Usage
    """Of the fullest stage."""

    def figures(self, shape: Shape, machine: Machine, tokens: float) -> dict[str, float]:
        """tokens/s/GPU, MFU, memory share, GPU-hours and days for `tokens`."""
        job = self.job
        rate = job.gbs * job.seq / self.seconds / job.gpus
        peak = machine.bf16 if job.precision == "bf16" else machine.fp8
        return {
            "step_s": self.seconds,
            "tokens_per_s_per_gpu": rate,
            "mfu": rate * shape.flops_per_token(job.seq) / peak,
            "memory_gib": self.usage.total / memory.GIB,
            "memory_share": self.usage.total / machine.memory,
            "gpu_hours": tokens / rate / 3600,
            "days": tokens / rate / job.gpus / 86400,
        }


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _recomputes(shape: Shape) -> list[frozenset[str]]:
    latent = ["mla_up_proj"] if shape.mla else []
    steps = [[], ["layernorm", "moe_act", *latent] if shape.experts else ["layernorm"]]
    if latent:
        steps.insert(1, latent)
    steps.append([*latent, "layernorm", "mlp" if not shape.experts else "moe"])
    return [frozenset(step) for step in steps] + [frozenset({"full"})]


def layouts(shape: Shape, base: Job, machine: Machine, fixed: dict[str, object]) -> Iterator[Job]:
    """Legal layouts of `base`'s GPUs, batch and precision, those of `fixed` alone where it names a
    field."""

    def choices(name: str, options: list) -> list:
        return [fixed[name]] if name in fixed else options

    tps = [t for t in (1, 2, 4, 8) if t <= machine.domain and shape.heads % t == 0]
    cps = [1] if base.seq <= 8192 else [1, 2, 4, 8, 16]
    eps = [e for e in _divisors(shape.experts) if e <= 256] if shape.experts else [1]
    for pp in choices("pp", [p for p in _divisors(base.gpus) if p <= min(shape.layers, 32)]):
        for tp in choices("tp", tps):
            for cp in choices("cp", cps):
                if base.gpus % (tp * cp * pp):
                    continue
                replicas = base.gpus // (tp * cp * pp)
                for ep in choices("ep", [e for e in eps if _regular(e, machine)]):
                    if base.gpus % (ep * pp):
                        continue
                    for mbs in choices("mbs", [1, 2, 4]):
                        if base.gbs % (replicas * mbs):
                            continue
                        sized = replace(base, tp=tp, cp=cp, pp=pp, ep=ep, mbs=mbs)
                        yield from _variants(shape, sized, choices)


def _regular(ep: int, machine: Machine) -> bool:
    """Expert groups that fill nodes, or fit in one."""
    return machine.domain % ep == 0 or ep % machine.domain == 0


def _variants(shape: Shape, job: Job, choices) -> Iterator[Job]:  # noqa: ANN001
    stages = [
        v for v in (1, 2, 3, 4, 6, 8) if v == 1 or (job.pp > 1 and job.pp * v <= shape.layers)
    ]
    for vp in choices("vp", stages):
        if vp > 1 and job.microbatches % job.pp:
            continue  # Megatron's interleaved schedule
        if 0 in slots(shape, job.pp, vp, job.seq)[:-1]:
            continue  # only the last slot, which has the logits, may be without a layer
        for recompute in choices("recompute", _recomputes(shape)):
            if job.ep == 1:
                yield replace(job, vp=vp, recompute=recompute)
                continue
            for dispatcher in choices("dispatcher", ["alltoall", "hierarchical"]):
                overlaps = [False]
                if (vp > 1 or job.pp == 1) and not recompute & {"full", "moe"} and shape.mtp < 2:
                    overlaps.append(True)
                for overlap in choices("ep_overlap", overlaps):
                    yield replace(
                        job, vp=vp, recompute=recompute, dispatcher=dispatcher, ep_overlap=overlap
                    )


def evaluate(
    shape: Shape, jobs: list[Job], machine: Machine, usages: list[memory.Usage] | None = None
) -> list[Plan]:
    """Predict every job; no check of memory."""
    usages = usages or [memory.fullest(shape, job) for job in jobs]
    if not jobs:
        return []
    rows = fit.table([Run({}, shape, job, machine, 1.0) for job in jobs])
    c, rates = rows.conditions, machine.measured
    if rates is None:
        parts = time.breakdown(rows.work, c, constants.load())
    else:
        kinds = np.array([job.precision for job in jobs])
        ways = np.array([job.dispatcher for job in jobs])
        parts = measured.breakdown(rows.work, kinds, ways, c.overlap, c.imbalance, rates)
    named = {name: np.broadcast_to(values, len(jobs)) for name, values in parts.items()}
    seconds = sum(named.values())
    return [
        Plan(
            job,
            float(seconds[i]),
            {name: float(values[i]) for name, values in named.items()},
            usages[i],
        )
        for i, job in enumerate(jobs)
    ]


def search(
    shape: Shape, base: Job, machine: Machine, fixed: dict[str, object] | None = None
) -> list[Plan]:
    """Layouts that fit, fastest first.

    Raises EfaError if none is legal, if none fits (naming the nearest), or if there are too many.
    """
    jobs = []
    for job in layouts(shape, base, machine, fixed or {}):
        jobs.append(job)
        if len(jobs) > _EFFORT:
            raise EfaError(
                f"more than {_EFFORT} layouts to look at: fix some with --fix parallel.tp=1"
            )
    if not jobs:
        raise EfaError(
            f"no layout divides {base.gpus} GPUs and a global batch of {base.gbs} for {shape.name}"
            f"{' with what --fix asks for' if fixed else ''}: change the batch or the nodes"
        )
    limit = machine.memory * (1 - RESERVE)
    usages = _usages(shape, jobs)
    sizes = [usage.total for usage in usages]
    fitting = [i for i, size in enumerate(sizes) if size <= limit]
    if not fitting:
        best = int(np.argmin(sizes))
        job = jobs[best]
        raise EfaError(
            f"{shape.name} does not fit {base.gpus} {machine.name}: the smallest layout "
            f"(tp{job.tp} "
            f"pp{job.pp} ep{job.ep} cp{job.cp} mbs{job.mbs}, "
            f"recompute {', '.join(sorted(job.recompute))}) "
            f"needs {sizes[best] / memory.GIB:.0f} of {limit / memory.GIB:.0f} GiB: take more nodes"
        )
    plans = evaluate(shape, [jobs[i] for i in fitting], machine, [usages[i] for i in fitting])
    return sorted(plans, key=lambda plan: plan.seconds)


def _usages(shape: Shape, jobs: list[Job]) -> list[memory.Usage]:
    """Memory of each job; dispatcher and overlap do not change it by more than a layer's rows."""
    known: dict[tuple, memory.Usage] = {}
    out = []
    for job in jobs:
        key = (job.tp, job.cp, job.pp, job.vp, job.ep, job.mbs, job.recompute)
        if key not in known:
            known[key] = memory.fullest(shape, replace(job, dispatcher="hierarchical"))
        out.append(known[key])
    return out


def describe(job: Job) -> str:
    """A layout in one line."""
    names = {f.name for f in fields(job)}
    words = [
        f"{name}{getattr(job, name)}" for name in ("tp", "cp", "pp", "vp", "ep") if name in names
    ]
    words.append(f"mbs{job.mbs}")
    if job.ep > 1:
        words.append(job.dispatcher + ("+overlap" if job.ep_overlap else ""))
    words.append("recompute " + ("+".join(sorted(job.recompute)) or "none"))
    return " ".join(words)


def hardware_flops(shape: Shape, job: Job) -> float:
    """FLOPs of a step that the GPUs execute, recomputation counted."""
    rows = fit.table([Run({}, shape, job, MACHINES["H200"], 1.0)]).work
    each = rows.gemm + rows.expert_gemm + rows.head + rows.attention
    return float(each[0]) * job.microbatches * job.dp * job.tp * job.cp
