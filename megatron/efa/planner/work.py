"""What one GPU computes and sends in a step: FLOPs, bytes and counts, without a clock.

Amounts of one microbatch are sums over all layers, forward, backward and recomputation, divided by
tp and cp but not by pp: the mean stage has 1/pp of them. All are floats, so rows of published runs
stack
into arrays for the fit.
"""

from dataclasses import dataclass

from megatron.efa.planner.activations import width
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import Machine
from megatron.efa.planner.pipeline import uneven
from megatron.efa.planner.shape import Shape

BF16 = 2
FP32 = 4


@dataclass
class Work:
    """Amounts of one GPU; per microbatch unless said otherwise."""

    gemm: float
    """FLOPs in the run's GEMM precision."""
    expert_gemm: float
    expert_rows: float
    """Rows that one expert's GEMM sees."""
    experts_here: float
    """Of one layer, on a rank."""
    head: float
    """FLOPs of the logits, always in bf16."""
    attention: float
    """FLOPs of the cores of attention, bf16."""
    scan: float
    """Bytes moved by Mamba-2 or linear-attention layers outside their GEMMs."""
    elementwise: float
    """Bytes of norms, activations, rope, residuals, loss."""
    heads: float
    """Bytes of queries, keys and values between projections and core: rope, norms."""
    permute: float
    """Bytes of the experts' permutations, activations and their quantisation."""
    unfused: float
    """Bytes of biases and clamps around the experts' activations, where no kernel fuses them."""
    weights: float
    """Bytes of weights read and gradients accumulated by the GEMMs."""
    blocks: float
    """Attention, linear and dense blocks that the host launches (recomputed ones count again)."""
    moe_blocks: float
    sends: float
    """Exchanges with the neighbouring stages."""
    ep_near: float
    """Bytes that a GPU sends inside its domain."""
    ep_far: float
    ep_rows: float
    """Rows sent to other nodes."""
    ep_calls: float
    """Exchanges of tokens."""
    tp_calls: float
    """Gathers and scatters of activations over the tensor group."""
    tp_near: float
    tp_far: float
    cp_bytes: float
    cp_far: float
    pp_bytes: float
    """Bytes of one stage boundary, one direction."""
    pp_far: float
    stages: float
    chunks: float
    microbatches: float
    uneven: float
    """Layers of the fullest stage over the mean."""
    dp_near: float
    """Bytes a step: gradients scattered and weights gathered inside the domain."""
    dp_far: float
    reduce: float
    """Of the data-parallel bytes, the share that gradients have."""
    optimizer: float
    """Bytes a step."""
    fsdp_near: float
    """Bytes of weights and gradients that sharded parameters move, a microbatch."""
    fsdp_far: float


def copies(shape: Shape, ep: int, domain: int, dispatcher: str) -> tuple[float, float]:
    """(rows sent inside the domain, rows sent to other domains) per token and exchange.

    Uniform routing. Flat: one a chosen expert. Others: one a distinct remote domain, then one a
    distinct GPU inside it. Node-limited routing caps the domains at `group_topk` where groups are
    domains.
    """
    k = shape.topk
    if ep <= 1:
        return 0.0, 0.0
    local = min(domain, ep)
    nodes = ep / local
    if dispatcher == "alltoall":
        return k * (local - 1) / ep, k * (ep - local) / ep
    gpus = ep * (1 - (1 - 1 / ep) ** k)
    near = gpus * (local - 1) / local
    distinct = nodes * (1 - (1 - 1 / nodes) ** k) if nodes > 1 else 1.0
    if shape.groups > shape.group_topk > 0 and nodes > 1:
        distinct = min(distinct, shape.group_topk * max(nodes / shape.groups, 1))
    return near, distinct * (nodes - 1) / nodes


def measure(shape: Shape, job: Job, machine: Machine) -> Work:
    """The work of one GPU of `job`'s mean pipeline stage."""
    split = job.tp * job.cp
    tokens = job.mbs * job.seq / split
    full = "full" in job.recompute
    h = shape.hidden
    passes = _passes(job)
    attention_layers = shape.attention_layers + shape.mtp
    moe_layers = shape.moe + (shape.mtp if shape.experts else 0)
    dense_layers = shape.dense_mlps + (0 if shape.experts else shape.mtp)

    dense = attention_layers * shape.attention_matrices() * passes["attention"]
    dense += dense_layers * shape.matrices * h * shape.ffn * passes["mlp"]
    dense += shape.linear * shape.linear_matrices() * passes["linear"]
    dense += moe_layers * shape.matrices * h * shape.shared_ffn * passes["shared"]
    dense += moe_layers * 2 * h * shape.latent * passes["moe"] + shape.mtp * 2 * h * h * 3
    routed = moe_layers * shape.topk * shape.expert_params() * passes["moe"]
    core = attention_layers * shape.core_attention(job.seq) * (passes["core"] + 0.5)
    core *= max(1.0, 256 / (shape.query_dim + shape.value_dim))  # narrow heads: exponentials bind

    near, far = copies(shape, job.ep, machine.domain, job.dispatcher)
    if job.natural is False and job.drop:
        near, far = near * 0.9, far * 0.9
    exchanges = 4 + (2 if passes["moe"] > 3 else 0)
    e = width(job)
    row = shape.expert_width * e
    rows = tokens * moe_layers * exchanges

    dense_params, expert_params = _held(shape, job)
    table = shape.vocab * h * (1 if shape.tied else 2) / job.tp
    gemm_weights = (dense_params + expert_params) * job.pp - table
    gather = _gathered(job)
    tp_group_far = job.tp > machine.domain
    tp_calls = (4 + (2 if full else 0)) * (attention_layers + dense_layers + moe_layers * 0.5)
    tp_bytes = tp_calls * tokens * job.tp * h * e * (job.tp - 1) / job.tp
    kv = (
        shape.heads * (shape.query_dim + shape.value_dim)
        if shape.mla
        else 2 * shape.kv * shape.head_dim
    )
    cp_bytes = 3 * attention_layers * tokens * kv / job.tp * job.tp * e * (job.cp - 1)

    dp_near, dp_far = _data_parallel(job, machine, dense_params, expert_params)
    fsdp = dense_params * 3 * e * float(job.fsdp)
    shard = dense_params / (job.dp * job.cp) + expert_params / job.edp
    mlp_width = moe_layers * shape.topk * shape.expert_ffn
    return Work(
        gemm=2 * dense * tokens,
        expert_gemm=2 * routed * tokens,
        expert_rows=max(tokens * shape.topk * job.ep * job.etp / max(shape.experts, 1), 1.0),
        experts_here=max(shape.experts / job.ep, 1.0),
        head=6 * shape.vocab * h * (1 + shape.mtp) * tokens,
        attention=2 * core * tokens,
        scan=tokens * shape.linear * shape.linear_heads * shape.linear_dim * 20 * passes["linear"],
        elementwise=tokens * (
            attention_layers * e * 24 * h * shape.streams
            + (shape.linear + moe_layers) * e * 12 * h
            + dense_layers * e * 12 * shape.ffn
            + moe_layers * e * 12 * shape.shared_ffn
            + shape.vocab * (1 + shape.mtp) * 20
        ) * (4 / 3 if full else 1.0),
        heads=tokens * attention_layers * e * 10 * shape.heads
        * (shape.query_dim + shape.value_dim),
        permute=tokens * e * (
            moe_layers * shape.topk * shape.expert_width * 16 + mlp_width * 14
        ) * passes["moe"] / 3,
        unfused=tokens * BF16 * mlp_width * 14 * shape.unfused * passes["moe"] / 3,
        weights=gemm_weights * (2 * gather + 2 * job.grad_bytes),
        blocks=(
            attention_layers * (1.8 if shape.mla else 1.0)
            + shape.linear
            + 0.5 * dense_layers
            + 0.4 * moe_layers * (shape.shared_ffn > 0)
        ) * (4 / 3 if full else 1.0) * (1.3 if job.tp > 1 else 1.0),
        sends=float(job.vp * (job.pp > 1)),
        moe_blocks=moe_layers * passes["moe"] / 3,
        ep_near=rows * near * row,
        ep_far=rows * far * row,
        ep_rows=rows * far,
        ep_calls=moe_layers * exchanges * (1.0 if job.ep > 1 else 0.0),
        tp_calls=tp_calls * (job.tp > 1),
        tp_near=0.0 if tp_group_far else tp_bytes,
        tp_far=tp_bytes if tp_group_far else 0.0,
        cp_bytes=cp_bytes if job.cp * job.tp <= machine.domain else 0.0,
        cp_far=0.0 if job.cp * job.tp <= machine.domain else cp_bytes,
        pp_bytes=tokens * h * e * (job.pp > 1),
        pp_far=float(job.gpus > machine.domain),
        stages=job.pp,
        chunks=job.vp,
        microbatches=job.microbatches,
        uneven=uneven(shape, job.pp, job.vp, job.seq),
        dp_near=dp_near,
        dp_far=dp_far,
        reduce=job.grad_bytes / (job.grad_bytes + gather),
        optimizer=shard * (24 + 2 * job.moment_bytes) + (dense_params + expert_params) * FP32 * 2,
        fsdp_near=fsdp * job.pp,
        fsdp_far=fsdp * job.pp * (job.dp * job.tp > machine.domain) / max(machine.domain / job.tp,
        1),
    )  # fmt: skip


def _passes(job: Job) -> dict[str, float]:
    """Forward passes' worth of GEMMs by module: 3 for forward and backward, 4 if recomputed."""
    names = job.recompute
    full = "full" in names
    again = 4.0 if full else 3.0
    latent = 3.4 if "mla_up_proj" in names else 3.0
    return {
        "attention": 4.0 if full else latent,
        "core": 4.0 if full or "core_attn" in names else 3.0,
        "linear": again,
        "mlp": 4.0 if full or "mlp" in names else 3.0,
        "moe": 4.0 if full or "moe" in names else 3.0,
        "shared": 4.0 if full or names & {"moe", "shared_experts"} else 3.0,
    }


def _held(shape: Shape, job: Job) -> tuple[float, float]:
    """(dense, routed expert) weights on one GPU of the mean stage."""
    mtp_dense, mtp_expert = shape.mtp_params()
    routed = shape.moe * shape.experts * shape.expert_params() + mtp_expert
    dense = shape.params() + mtp_dense + mtp_expert - routed
    return dense / (job.tp * job.pp), routed / (job.ep * job.etp * job.pp)


def _gathered(job: Job) -> int:
    """Bytes of a weight as the data-parallel group gathers it and GEMMs read it."""
    return width(job) if job.precision in ("bf16", "fp32") else 1


def _data_parallel(job: Job, machine: Machine, dense: float, expert: float) -> tuple[float, float]:
    """(bytes inside the domain, bytes between domains) of gradients and weights in a step.

    A ring over all GPUs of a domain that are in the group enters the domain once for all of them.
    """
    near = far = 0.0
    gather = _gathered(job)
    for held, group, stride in (
        (dense, job.dp * job.cp, job.tp),
        (expert, job.edp, job.ep * job.etp),
    ):
        if job.fsdp and held is dense:
            continue
        size = held * (job.grad_bytes + gather) * (group - 1) / max(group, 1)
        inside = max(min(machine.domain // stride, group), 1)
        near += size if inside > 1 else 0.0
        far += size / inside if group > inside else 0.0
    return near, far
