"""A plan as one HTML page: the table, stacked time, memory by stage, a timeline of one step.

Plain SVG without scripts or other files, so that the page can be mailed.
"""

from html import escape

from megatron.efa.planner import memory, search
from megatron.efa.planner.machines import Machine
from megatron.efa.planner.search import Plan
from megatron.efa.planner.shape import Shape

_COLOURS = (
    "#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1",
    "#ff9da7", "#9c755f", "#bab0ac", "#86bcb6", "#d37295", "#8cd17d", "#a0cbe8",
)  # fmt: skip
_WIDTH = 900


def html(shape: Shape, machine: Machine, plans: list[Plan], figures: list[dict]) -> str:
    """The page of `plans` (fastest first) and their figures."""
    head = "".join(f"<th>{name}</th>" for name in (*figures[0], "layout"))
    body = "".join(
        "<tr>"
        + "".join(f"<td>{value:.4g}</td>" for value in f.values())
        + f"<td>{escape(search.describe(plan.job))}</td></tr>"
        for plan, f in zip(plans, figures, strict=True)
    )
    usages = [memory.usage(shape, plans[0].job, s) for s in range(plans[0].job.pp)]
    names = ("weights", "gradients", "optimizer", "activations", "buffers", "overhead")
    stages = [(f"stage {u.stage}", {n: getattr(u, n) / memory.GIB for n in names}) for u in usages]
    times = [(search.describe(plan.job), plan.parts) for plan in plans]
    return (
        "<!doctype html><meta charset=utf-8>"
        f"<title>{escape(shape.name)} on {plans[0].job.gpus} {machine.name}</title>"
        "<style>body{font:14px sans-serif;margin:2em}"
        "td,th{padding:2px 8px;text-align:right}</style>"
        f"<h1>{escape(shape.name)} on {plans[0].job.gpus} {machine.name}</h1>"
        "<p>Predictions, not measurements.</p>"
        f"<table><tr>{head}</tr>{body}</table>"
        f"<h2>Seconds of a step</h2>{_bars(times, 's')}"
        f"<h2>GiB by stage, best layout (a GPU has {machine.memory / memory.GIB:.0f})</h2>"
        f"{_bars(stages, 'GiB')}<h2>One step, best layout</h2>{_timeline(plans[0])}"
    )


def _bars(rows: list[tuple[str, dict[str, float]]], unit: str) -> str:
    longest = max(sum(parts.values()) for _, parts in rows)
    names = list(rows[0][1])
    out = []
    for i, (label, parts) in enumerate(rows):
        x = 0.0
        out.append(f'<text x="0" y="{i * 34 + 11}" font-size="11">{escape(label)}</text>')
        for n, name in enumerate(names):
            width = parts[name] / longest * _WIDTH
            out.append(
                f'<rect x="{x:.1f}" y="{i * 34 + 14}" width="{width:.1f}" height="14" '
                f'fill="{_COLOURS[n % len(_COLOURS)]}">'
                f"<title>{name} {parts[name]:.3g} {unit}</title></rect>"
            )
            x += width
    key = " ".join(
        f'<span style="color:{_COLOURS[n % len(_COLOURS)]}">&#9632;</span> {name}'
        for n, name in enumerate(names)
    )
    return f'<svg width="{_WIDTH}" height="{len(rows) * 34}">{"".join(out)}</svg><p>{key}</p>'


def _timeline(plan: Plan, most: int = 24) -> str:
    """1F1B of the first microbatches: a forward takes a third of a microbatch, a backward two."""
    job = plan.job
    count = min(job.microbatches, most)
    ready: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * job.pp
    out = []
    orders = [_order(stage, job.pp, count) for stage in range(job.pp)]
    done = [0] * job.pp
    while any(done[s] < len(orders[s]) for s in range(job.pp)):
        for stage in range(job.pp):
            if done[stage] == len(orders[stage]):
                continue
            kind, micro = orders[stage][done[stage]]
            before = stage - 1 if kind == "F" else stage + 1
            key = (kind, micro, before)
            if 0 <= before < job.pp and key not in ready:
                continue
            start = max(clock[stage], ready.get(key, 0.0))
            clock[stage] = ready[(kind, micro, stage)] = start + (1 if kind == "F" else 2)
            done[stage] += 1
            out.append((stage, start, clock[stage], kind, micro))
    scale = _WIDTH / max(clock)
    boxes = "".join(
        f'<rect x="{a * scale:.1f}" y="{s * 12}" width="{(b - a) * scale:.1f}" height="11" '
        f'fill="{"#4e79a7" if kind == "F" else "#59a14f"}" stroke="white">'
        f"<title>{kind}{m}</title></rect>"
        for s, a, b, kind, m in out
    )
    note = f"first {count} of {job.microbatches} microbatches, one chunk a stage"
    return f'<svg width="{_WIDTH}" height="{job.pp * 12}">{boxes}</svg><p>{note}</p>'


def _order(stage: int, pp: int, count: int) -> list[tuple[str, int]]:
    """1F1B's order on one stage: warm-up forwards, then one forward and one backward in turn."""
    warm = min(pp - stage - 1, count)
    order = [("F", m) for m in range(warm)]
    for m in range(count - warm):
        order += [("F", warm + m), ("B", m)]
    return order + [("B", m) for m in range(count - warm, count)]
