"""Small models whose saved bytes are measured and compared with the planner's."""

import shlex

TOLERANCE = 0.05

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 192 --ffn-hidden-size 448 --num-attention-heads 4 "
    "--kv-channels 56 --seq-length 128 --max-position-embeddings 128 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--transformer-impl local --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --attention-backend unfused --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 512 --make-vocab-size-divisible-by 1 --use-distributed-optimizer "
    "--distributed-backend gloo"
)
_GQA = "--group-query-attention --num-query-groups 2"
_MLA = (
    "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 40 --rope-type rope --qk-layernorm"
)
_MOE = (
    "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 104 --moe-layer-freq [0,1] "
    "--moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
)
_SHARED = "--moe-shared-expert-intermediate-size 136"
_DEEPSEEK = (
    f"{_MLA} {_MOE} {_SHARED} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss"
)
_TP = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
_EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SOME = "--recompute-granularity selective --recompute-modules"

_CASES = {
    "dense, fp32": (1, ""),
    "dense": (1, "--bf16"),
    "GQA": (1, f"--bf16 {_GQA}"),
    "GQA, norms of queries and keys, fp32": (1, f"{_GQA} --qk-layernorm"),
    "GQA, norms of queries and keys": (1, f"--bf16 {_GQA} --qk-layernorm"),
    "MLA": (1, f"--bf16 {_MLA}"),
    "MLA, fp32": (1, _MLA),
    "experts": (1, f"--bf16 {_MOE}"),
    "experts and a shared one, fp32": (1, f"{_MOE} {_SHARED}"),
    "DeepSeek": (1, f"--bf16 {_DEEPSEEK}"),
    "DeepSeek, MTP": (1, f"--bf16 {_DEEPSEEK} --mtp-num-layers 1"),
    "DeepSeek, MTP, full recompute": (1, f"--bf16 {_DEEPSEEK} --mtp-num-layers 1 {_FULL}"),
    "experts, full recompute": (1, f"--bf16 {_MOE} {_FULL}"),
    "GQA, recompute core_attn": (1, f"--bf16 {_GQA} {_SOME} core_attn"),
    "GQA, recompute mlp": (1, f"--bf16 {_GQA} {_SOME} mlp"),
    "experts, recompute moe, layernorm": (1, f"--bf16 {_MOE} {_SHARED} {_SOME} moe layernorm"),
    "experts, recompute shared_experts": (1, f"--bf16 {_MOE} {_SHARED} {_SOME} shared_experts"),
    "DeepSeek, recompute mla_up_proj": (1, f"--bf16 {_DEEPSEEK} {_SOME} mla_up_proj"),
    "DeepSeek, recompute layernorm, mla_up_proj, mlp": (
        1,
        f"--bf16 {_DEEPSEEK} {_SOME} layernorm mla_up_proj mlp",
    ),
    "DeepSeek, recompute all": (
        1,
        f"--bf16 {_DEEPSEEK} {_SOME} core_attn layernorm mla_up_proj mlp moe",
    ),
    "TP2, sequence parallel": (2, f"--bf16 {_GQA} {_TP}"),
    "DeepSeek, TP2, sequence parallel": (2, f"--bf16 {_DEEPSEEK} {_TP}"),
    "DeepSeek, EP2, alltoall": (2, f"--bf16 {_DEEPSEEK} {_EP} alltoall"),
    "DeepSeek, EP2, hierarchical": (2, f"--bf16 {_DEEPSEEK} {_EP} hierarchical"),
}

GRID: dict[str, tuple[int, list[str]]] = {
    name: (ranks, shlex.split(flags)) for name, (ranks, flags) in _CASES.items()
}
"""Name -> (ranks, flags beside MODEL's)."""
