"""Bytes of one rank: weights, gradients, optimizer, activations, buffers.

Weights, gradients and optimizer are exact (the dry run counts the same). Activations are what the
modules save for the backward pass, tensor by tensor (`activations`), times the microbatches that
the schedule keeps in flight.
"""

from dataclasses import dataclass, replace

from megatron.efa.planner import activations
from megatron.efa.planner.layout import Job
from megatron.efa.planner.pipeline import stages
from megatron.efa.planner.shape import Shape

BF16 = 2
FP32 = 4
GIB = 2**30

CONTEXT = 3.0 * GIB
"""CUDA context, cuBLAS and cuDNN workspaces of a process."""
COMMUNICATOR = 0.15 * GIB
"""NCCL's buffers of one communicator that leaves the node."""
FRAGMENTED = 0.04
"""Share of live bytes that the allocator reserves beyond them (published peaks: reserved over
allocated is 4 to 18 %; expandable segments reach the lower end)."""


@dataclass(frozen=True)
class States:
    """Bytes per parameter that a rank keeps; the optimizer's are divided by the group."""

    weight: float = 2
    gradient: float = 4
    master: float = 4
    moments: float = 8
    sharded: bool = True

    def split(
        self, dense: float, expert: float, dense_group: int, expert_group: int
    ) -> tuple[float, float, float]:
        """(weights, gradients, optimizer) bytes for parameters on one rank and their groups."""
        total = dense + expert
        each = self.master + self.moments
        if not self.sharded:
            return total * self.weight, total * self.gradient, total * each
        optimizer = each * (dense / dense_group + expert / expert_group)
        return total * self.weight, total * self.gradient, optimizer


@dataclass(frozen=True)
class Held:
    """Parameters of one rank."""

    dense: float
    expert: float


@dataclass(frozen=True)
class Usage:
    """Bytes of the fullest moment of one pipeline stage."""

    stage: int
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Logits and loss, the dispatcher's rows, recomputation's working set."""
    overhead: float
    """Context, communicators, allocator."""

    @property
    def total(self) -> float:
        return (
            self.weights + self.gradients + self.optimizer
            + self.activations + self.buffers + self.overhead
        )  # fmt: skip


def states(job: Job) -> States:
    """What a rank keeps under Megatron's distributed optimizer; in fp32 weights are the masters."""
    if job.precision == "fp32":
        return States(weight=4, gradient=4, master=0, moments=2 * job.moment_bytes)
    return States(gradient=job.grad_bytes, moments=2 * job.moment_bytes)


def held(shape: Shape, job: Job, stage: int, split: tuple[int, int] | None = None) -> Held:
    """Parameters of a rank of pipeline stage `stage`; exact, with tensor parallelism's replicas.

    `split`: (dense, MoE) layers of the stage, where they are not the planner's own. Hybrids of
    several kinds of blocks count as if every stage had the same share of each kind.
    """
    plain, moe = split or stages(shape, job.pp, job.vp, job.seq)[stage]
    h, tp = shape.hidden, job.tp
    if shape.hybrid:
        dense, expert = _hybrid_blocks(shape, job, (plain + moe) / shape.layers)
    else:
        dense = (plain + moe) * (_attention(shape, tp) + 2 * h)
        dense += plain * shape.matrices * h * shape.ffn / tp
        dense += moe * _moe_dense(shape, tp)
        expert = moe * shape.experts * shape.expert_params() / (job.ep * job.etp)
    if stage == 0:
        dense += shape.vocab * h / tp
    if stage == job.pp - 1:
        dense += shape.vocab * h / tp + h
        if shape.mtp:
            block = _attention(shape, tp) + 2 * h + 3 * h + 2 * h * h / tp
            if shape.experts:
                block += _moe_dense(shape, tp)
                expert += shape.mtp * shape.experts * shape.expert_params() / (job.ep * job.etp)
            else:
                block += shape.matrices * h * shape.ffn / tp
            dense += shape.mtp * block
            if job.pp > 1:
                dense += shape.vocab * h / tp  # MTP embeds its tokens where it stands
    return Held(dense, expert)


def _hybrid_blocks(shape: Shape, job: Job, share: float) -> tuple[float, float]:
    """(dense, expert) parameters of a stage with `share` of a hybrid's blocks."""
    h, tp = shape.hidden, job.tp
    mixers = shape.attention_layers * _attention(shape, tp)
    mixers += shape.linear * shape.linear_matrices() / tp
    dense = mixers + shape.layers * h + shape.moe * _moe_dense(shape, tp)
    dense += shape.dense_mlps * (shape.matrices * h * shape.ffn / tp + h)
    expert = shape.moe * shape.experts * shape.expert_params() / (job.ep * job.etp)
    return share * dense, share * expert


def _attention(shape: Shape, tp: int) -> float:
    """Parameters of one attention layer on one tensor rank; latent down-projections are whole."""
    h, n = shape.hidden, shape.heads
    if not shape.mla:
        norms = 2 * shape.head_dim if shape.qk_norm else 0
        return shape.attention_matrices() / tp + norms
    r = max(shape.q_lora, 0)
    whole = h * r + h * (shape.kv_lora + shape.qk_rope) + shape.attention_norms()
    query = (r or h) * n * shape.query_dim
    return (
        whole
        + (query + shape.kv_lora * n * (shape.qk_nope + shape.v_dim) + n * shape.v_dim * h) / tp
    )


def _moe_dense(shape: Shape, tp: int) -> float:
    return shape.matrices * shape.hidden * shape.shared_ffn / tp + shape.hidden * (
        shape.experts + 2 * shape.latent
    )


def chunks_in_flight(job: Job, stage: int) -> int:
    """Model chunks whose activations a stage keeps at its fullest moment (1F1B; interleaved with
    vp)."""
    if job.vp == 1:
        return min(job.pp - stage, job.microbatches)
    warm = (job.pp - stage - 1) * 2 + (job.vp - 1) * job.pp + 1
    return min(warm, job.microbatches * job.vp)


def usage(
    shape: Shape,
    job: Job,
    stage: int,
    kept: States | None = None,
    split: tuple[int, int] | None = None,
) -> Usage:
    """Bytes of a rank of stage `stage`; `kept` and `split` stand in for the planner's own."""
    params = held(shape, job, stage, split)
    weights, gradients, optimizer = (kept or states(job)).split(
        params.dense, params.expert, job.dp * job.cp, job.edp
    )
    plain, moe = split or stages(shape, job.pp, job.vp, job.seq)[stage]
    chunk = activations.blocks(shape, job, plain, moe) / job.vp
    live = chunk * chunks_in_flight(job, stage)
    if stage == job.pp - 1:
        live += shape.mtp * activations.mtp(shape, job)
        live += sum(activations.last(shape, job).values())
    if stage == 0:
        first = sum(activations.first(shape, job).values())
        live += first * chunks_in_flight(job, stage) / job.vp
    buffers = _buffers(shape, job, stage)
    live, buffers = live * job.tokens, buffers * job.tokens
    groups = sum(size > 1 for size in (job.tp, job.cp, job.pp, job.ep, job.dp, job.edp)) + 1
    allocated = weights + gradients + optimizer + live + buffers
    overhead = CONTEXT + COMMUNICATOR * groups + FRAGMENTED * allocated
    return Usage(stage, weights, gradients, optimizer, live, buffers, overhead)


def _buffers(shape: Shape, job: Job, stage: int) -> float:
    """Bytes per token beside the saved tensors: what exists while one layer or the loss is
    computed."""
    total = 0.0
    if stage == job.pp - 1:
        total += shape.vocab * BF16  # logits, whose fp32 exponentials are among the saved tensors
    if shape.experts and job.ep > 1:
        rows = shape.topk if job.dispatcher == "alltoall" else shape.topk + job.ep / 8
        total += 2 * rows * shape.expert_width * BF16
    if "full" in job.recompute or "moe" in job.recompute:
        whole = replace(job, recompute=job.recompute - {"full", "moe"})  # one layer at a time
        total += sum(activations.layer(shape, whole, moe=shape.experts > 0).values())
    return total


def fullest(shape: Shape, job: Job, kept: States | None = None) -> Usage:
    """The stage with the most bytes; `kept`: bytes per parameter, if not those of `states`.

    Microbatches in flight fall with the stage, so it is the first with a given split of its layers,
    or the
    last, which has the logits.
    """
    split = stages(shape, job.pp, job.vp, job.seq)
    candidates = {split.index(layers) for layers in split} | {0, min(1, job.pp - 1), job.pp - 1}
    return max((usage(shape, job, stage, kept) for stage in candidates), key=lambda u: u.total)
