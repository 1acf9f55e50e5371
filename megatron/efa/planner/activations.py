"""Bytes that one rank saves for the backward pass, by module, per token of its sequence shard.

Two implementations are modelled, since they save different tensors:

* `transformer_engine`: what Transformer Engine's fused modules and Megatron's fused kernels keep;
* `local`: what Megatron's plain modules keep on CPUs, tensor by tensor. `saved` measures it in
  real forward passes (tools/measure_activations.py), and both agree within 5 %.

They differ in three places: plain norms keep two fp32 copies of their input (fused: the input and
a scalar), plain attention keeps its matrix of scores (fused: one scalar a head and query), and
plain grouped-query attention expands keys and values to all heads.

e: bytes of an activation's element; low: of an input of a GEMM (1 under FP8). A tensor that two
modules save is counted in the first.
"""

from megatron.efa.planner.layout import Job
from megatron.efa.planner.shape import Shape

BF16 = 2
FP32 = 4
INT64 = 8

MODULES = ("embedding", "norms", "attention", "core", "mlp", "moe", "experts", "mtp", "output")
"""norms: the layers' own two and the last. attention: projections, latent norms, rope. core:
queries, keys, values, scores. moe: router, dispatcher, shared expert. output: logits and loss."""

Bytes = dict[str, float]


def width(job: Job) -> int:
    """Bytes of an activation's element."""
    return FP32 if job.precision == "fp32" else BF16


def layer(shape: Shape, job: Job, moe: bool) -> Bytes:
    """What one layer saves, by module."""
    if "full" in job.recompute:
        return {"norms": float(width(job) * shape.hidden)}
    local = job.implementation == "local"
    out = _local_attention(shape, job) if local else _fused_attention(shape, job)
    out |= _local_mlp(shape, job, moe) if local else _fused_mlp(shape, job, moe)
    out["norms"] = _norms(shape, job)
    return {name: float(value) for name, value in out.items()}


def blocks(shape: Shape, job: Job, dense: int, moe: int) -> float:
    """What `dense` and `moe` decoder layers save; of a hybrid, as many of its blocks, mixed."""
    if not shape.hybrid:
        plain = sum(layer(shape, job, moe=False).values()) if dense else 0.0
        routed = sum(layer(shape, job, moe=True).values()) if moe else 0.0
        return dense * plain + moe * routed
    if "full" in job.recompute:
        return (dense + moe) * width(job) * shape.hidden
    norm = _norms(shape, job) / 2
    mixer = sum(_fused_attention(shape, job).values())
    total = shape.attention_layers * (mixer + norm) + shape.linear * (_scan(shape, job) + norm)
    total += shape.moe * (sum(_fused_mlp(shape, job, moe=True).values()) + norm)
    total += shape.dense_mlps * (sum(_fused_mlp(shape, job, moe=False).values()) + norm)
    return (dense + moe) / shape.layers * total


def _scan(shape: Shape, job: Job) -> float:
    """A Mamba-2 mixer: its input, the projection's output, what convolution, scan and gated norm
    give, and the states between chunks of 128 tokens in fp32. Linear attention counts alike."""
    low = _low(job)
    inner = shape.linear_heads * shape.linear_dim
    side = 2 * shape.linear_groups * shape.linear_state
    states = FP32 * inner * shape.linear_state / 128
    projected = BF16 * (2 * inner + side + shape.linear_heads) + BF16 * (inner + side)
    return _norm_output(shape, job, low) + projected + BF16 * inner + low * inner + states


def mtp(shape: Shape, job: Job) -> float:
    """What one multi-token-prediction layer saves, its head aside: two norms and a projection that
    joins them, a decoder layer, a norm."""
    e = width(job)
    if "full" in job.recompute:  # all of it is made again from its two inputs
        return 2 * e * shape.hidden
    inner = sum(layer(shape, job, moe=shape.experts > 0).values())
    return inner + 3 * _norm(shape.hidden, job) + e * 2 * shape.hidden


def first(shape: Shape, job: Job) -> Bytes:
    """What embeddings save: ids of tokens, whole on every tensor rank, and a mask of its part;
    fully recomputed layers also keep one copy of the angles of rope."""
    ids = (1 + shape.mtp) * (INT64 + (job.tp > 1)) * job.tp
    angles = FP32 * _angles(shape, job) if "full" in job.recompute and not shape.mla else 0
    return {"embedding": float(ids), "norms": float(angles)}


def last(shape: Shape, job: Job) -> Bytes:
    """What the last norm and each head save: input, exponentials of the logits, masks, labels."""
    e = width(job)
    heads = 1 + shape.mtp
    row = FP32 * shape.vocab + (INT64 + FP32 + 1) * job.tp
    return {
        "norms": float(_norm(shape.hidden, job)),
        "output": float(heads * (e * shape.hidden + row)),
    }


def _norm(size: int, job: Job) -> float:
    """One norm over `size`, without its output."""
    if job.implementation == "local":
        return 2 * FP32 * size + FP32  # torch's RMSNorm on CPUs: input and normalised input in fp32
    return width(job) * size + FP32


def _norms(shape: Shape, job: Job) -> float:
    """The layer's two norms; recomputed ones keep their inputs alone."""
    if "layernorm" in job.recompute:
        return 2 * width(job) * shape.hidden
    return 2 * _norm(shape.hidden, job)


def _low(job: Job) -> int:
    return 1 if job.precision in ("fp8", "fp4") else width(job)


def _norm_output(shape: Shape, job: Job, size: int) -> float:
    """A norm's output, `size` bytes an element: its consumers save it unless it is recomputed."""
    return 0 if "layernorm" in job.recompute else size * shape.hidden


def _angles(shape: Shape, job: Job) -> float:
    """Elements of one table of rope's angles: a row for each place in the sequence, no batch."""
    return (shape.qk_rope if shape.mla else shape.head_dim) * job.tp * job.cp / job.mbs


def _local_attention(shape: Shape, job: Job) -> Bytes:
    e, n, names = width(job), shape.heads, job.recompute
    qd, vd, g = shape.query_dim, shape.value_dim, shape.kv
    attention = _norm_output(shape, job, e) + e * n * vd  # inputs of the first and last projections
    qkv, again = e * n * (2 * qd + vd), "core_attn" in names
    angles = _angles(shape, job)
    if shape.mla:
        r = max(shape.q_lora, 0)
        attention += (_norm(r, job) + e * r) * (r > 0) + _norm(shape.kv_lora, job)
        attention += e * shape.kv_lora + (e * shape.qk_rope if e == FP32 else 0)
        if "mla_up_proj" in names:  # keeps its inputs, the keys' rope part within a larger tensor
            attention += e * (shape.kv_lora + shape.qk_rope) + FP32 * angles
            qkv = 0
        else:
            attention += 4 * e * angles
    else:
        attention += 4 * e * angles
        whole = e * (n + 2 * g) * qd  # the projection's output, of which a part keeps all
        in_norm = shape.qk_norm and e == FP32
        if shape.qk_norm:
            kept = whole if in_norm else FP32 * g * qd
            attention += 2 * FP32 * n * qd + FP32 * g * qd + kept + FP32 * (n + g)
        if again or g == n:  # values not yet, or not at all, expanded to all heads
            qkv = e * (n + (g if again else n)) * qd + (0 if in_norm else whole)
    scores = e * n * job.seq + job.seq * job.tp * job.cp / job.mbs  # and the causal mask
    if again:
        return {"attention": attention + qkv, "core": 0}
    return {"attention": attention, "core": qkv + scores}


def _local_mlp(shape: Shape, job: Job, moe: bool) -> Bytes:
    e, names, up = width(job), job.recompute, shape.matrices - 1
    given = _norm_output(shape, job, e)
    if not moe:
        return {"mlp": given + (0 if "mlp" in names else e * (up + 1) * shape.ffn)}
    if "moe" in names:
        return {"moe": given}
    k, etp = shape.topk, job.etp
    router = FP32 * shape.experts + (2 * INT64 + FP32) * k
    dispatcher = 3 * INT64 * k
    shared = 0 if "shared_experts" in names else e * (up + 1) * shape.shared_ffn
    rows = k * (e * etp * shape.expert_width + FP32 * etp + e * (up + 1) * shape.expert_ffn)
    return {"moe": given + router + dispatcher + shared, "experts": rows}


def _fused_attention(shape: Shape, job: Job) -> Bytes:
    low, n, names = _low(job), shape.heads, job.recompute
    qd, vd = shape.query_dim, shape.value_dim
    out = BF16 * n * vd  # of the core, saved by it and by the last projection
    attention = _norm_output(shape, job, low) + (low * n * vd if low == 1 else 0)
    if shape.mla:
        r = max(shape.q_lora, 0)
        latent = BF16 * (r + shape.kv_lora + shape.qk_rope)
        attention += latent + low * (r + shape.kv_lora) * ("mla_up_proj" not in names)
        core = 0 if "mla_up_proj" in names else BF16 * n * (2 * qd + vd)
    else:
        core = BF16 * (n + 2 * shape.kv) * qd
        if shape.qk_norm:
            attention += BF16 * (n + shape.kv) * qd
    statistics = 0 if "core_attn" in names else FP32 * n
    return {"attention": attention, "core": core + out + statistics}


def _fused_mlp(shape: Shape, job: Job, moe: bool) -> Bytes:
    low, names, up = _low(job), job.recompute, shape.matrices - 1
    if not moe:
        inner = shape.ffn * (BF16 * up + low)
        return {"mlp": _norm_output(shape, job, low) + (0 if "mlp" in names else inner)}
    given = _norm_output(shape, job, BF16)  # the router reads it in bf16 whatever the GEMMs do
    if "moe" in names:
        return {"moe": given}
    k = shape.topk
    router = FP32 * 2 * shape.experts + (2 * INT64 + FP32) * k
    places = FP32 * (2 * shape.experts + 1)  # Transformer Engine's map of rows
    shared = shape.shared_ffn * (BF16 * up + low) + (shape.hidden if low == 1 else 0)
    if "shared_experts" in names or not shape.shared_ffn:
        shared = 0
    rows = k * (low * shape.expert_width * job.etp + FP32 + BF16 * up * shape.expert_ffn)
    rows += 0 if "moe_act" in names else k * low * shape.expert_ffn
    return {
        "moe": given + router + places + shared + 2 * BF16 * shape.latent,
        "experts": rows,
    }
