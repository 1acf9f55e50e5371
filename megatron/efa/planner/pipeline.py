"""Which layers stand on which pipeline stage: an even split, or Megatron's layout string.

Slots are numbered as Megatron walks them: slot i is chunk i // pp of stage i % pp.
"""

from functools import lru_cache
from itertools import accumulate, groupby

from megatron.efa.planner.shape import Shape


def extra_layers(shape: Shape, seq: int) -> float:
    """Time of MTP and logits, which the last slot has, in decoder layers (by multiply-adds)."""
    layer = (shape.active_params() - 2 * shape.vocab * shape.hidden) / shape.layers
    layer += shape.core_attention(seq) * shape.attention_layers / shape.layers
    return shape.mtp + shape.vocab * shape.hidden * (1 + shape.mtp) / layer


@lru_cache(maxsize=4096)
def slots(shape: Shape, pp: int, vp: int, seq: int) -> tuple[int, ...]:
    """Decoder layers of each slot: each layer goes to the stage with the least to do so far."""
    load = [0.0] * pp
    load[-1] = extra_layers(shape, seq)
    counts = [0] * (pp * vp)
    for _ in range(shape.layers):
        stage = min(range(pp), key=lambda s: (load[s], -s))
        chunk = min(range(vp), key=lambda c: (counts[c * pp + stage], -c))
        counts[chunk * pp + stage] += 1
        load[stage] += 1
    return tuple(counts)


@lru_cache(maxsize=4096)
def stages(shape: Shape, pp: int, vp: int, seq: int) -> tuple[tuple[int, int], ...]:
    """(dense, MoE) decoder layers of each stage."""
    counts = slots(shape, pp, vp, seq)
    first = list(accumulate(counts, initial=0))
    leading = shape.dense if shape.experts else shape.layers
    dense = [max(min(leading - at, n), 0) for at, n in zip(first[:-1], counts, strict=True)]
    return tuple((sum(dense[s::pp]), sum(counts[s::pp]) - sum(dense[s::pp])) for s in range(pp))


@lru_cache(maxsize=4096)
def uneven(shape: Shape, pp: int, vp: int, seq: int) -> float:
    """Time of the fullest stage over the mean."""
    counts = slots(shape, pp, vp, seq)
    load = [float(sum(counts[s::pp])) for s in range(pp)]
    load[-1] += extra_layers(shape, seq)
    return max(load) / (sum(load) / pp)


def layout(shape: Shape, pp: int, vp: int, seq: int) -> str:
    """Megatron's --pipeline-model-parallel-layout for `slots`, repeats folded."""
    words = ["t" * count for count in slots(shape, pp, vp, seq)]
    words[0] = "E" + words[0]
    words[-1] += "m" * shape.mtp + "L"
    parts = []
    for word, run in groupby(words):
        repeats = len(list(run))
        parts.append((word, repeats))
    out = ""
    for word, repeats in parts:
        out += f"({word}|)*{repeats}" if repeats > 1 else f"{word}|"
    return out.rstrip("|")
