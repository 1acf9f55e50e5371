"""What Megatron must carry on CPUs: name -> (ranks, flags)."""

from tests.parity.harness import MLA, MOE

TP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAP = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather"]
RECOMPUTE = ["--recompute-granularity", "selective", "--recompute-modules"]
SHARED = ["--moe-shared-expert-intermediate-size", "48"]


def pp(size, layers_per_virtual_stage=0):
    flags = ["--pipeline-model-parallel-size", str(size)]
    if layers_per_virtual_stage:
        flags += ["--num-layers-per-virtual-pipeline-stage", str(layers_per_virtual_stage)]
    return flags


def ep(size, etp=1):
    sizes = ["--expert-model-parallel-size", str(size)]
    return [*MOE, *sizes, "--expert-tensor-parallel-size", str(etp)]


LAYOUTS = {
    "one rank": (1, []),
    "one rank, experts": (1, MOE),
    "TP2 + SP": (2, TP),
    "PP2": (2, pp(2)),
    "PP2, virtual stages": (2, [*pp(2, 1), "--num-layers", "4"]),
    "EP2": (2, ep(2)),
    "EP4": (4, ep(4)),
    "ETP2 x EP2": (4, ep(2, etp=2)),
    "TP2 + SP x ETP2 x EP2": (4, [*TP, *ep(2, etp=2)]),
    "TP2 + SP x EP2": (2, [*TP, *ep(2)]),
    "PP2 x EP2": (4, [*pp(2), *ep(2)]),
    "DP2, distributed optimizer, both overlaps": (2, [*MOE, *OVERLAP]),
    "EP2, two instances of the distributed optimizer, overlaps": (
        4,
        [*ep(2), *OVERLAP, "--num-distributed-optimizer-instances", "2"],
    ),
    "EP2, distributed optimizer": (2, [*ep(2), *DISTRIBUTED]),
    "MLA": (2, [*ep(2), *MLA]),
    "MLA, TP2 + SP": (2, [*TP, *ep(2), *MLA]),
    "MTP": (2, [*ep(2), "--mtp-num-layers", "1"]),
    "MTP, PP2": (2, [*MOE, *pp(2), "--mtp-num-layers", "1"]),
    "shared experts": (2, [*ep(2), *SHARED]),
    "shared experts, overlapped": (2, [*ep(2), *SHARED, "--moe-shared-expert-overlap"]),
    "sigmoid router with bias": (
        2,
        [*ep(2), "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"],
    ),
    "seq_aux_loss": (
        2,
        [
            *ep(2),
            *("--moe-router-load-balancing-type", "seq_aux_loss"),
            *("--moe-aux-loss-coeff", "1e-2"),
        ],
    ),
    "capacity": (2, [*ep(2), "--moe-expert-capacity-factor", "1.0"]),
    "bf16": (2, [*ep(2), "--bf16"]),
    "bf16, TP2 + SP, distributed optimizer": (2, [*TP, *ep(2), *OVERLAP, "--bf16"]),
    "fp16": (2, [*ep(2), "--fp16", "--initial-loss-scale", "4096"]),
    "full recompute": (
        2,
        [
            *ep(2),
            *("--recompute-granularity", "full"),
            *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ],
    ),
    "recompute core_attn and moe": (2, [*ep(2), *RECOMPUTE, "core_attn", "moe"]),
    "recompute layernorm": (2, [*ep(2), *RECOMPUTE, "layernorm"]),
    "recompute mla_up_proj": (2, [*ep(2), *MLA, *RECOMPUTE, "mla_up_proj"]),
    "data loader workers": (1, ["--num-workers", "1"]),
}

# Plain upstream cannot train these without Transformer Engine or Apex; what it says instead. A
# layout that it learns to train must leave this table, or its test fails.
UPSTREAM_REFUSES = dict.fromkeys(
    [name for name in LAYOUTS if "TP2 + SP" in name],
    "sequence parallel not supported by torch LayerNorm",
)
UPSTREAM_REFUSES |= {
    "MLA": "unexpected keyword argument 'k_channels'",
    "recompute layernorm": "name 'FP8GlobalStateManager' is not defined",
    "recompute mla_up_proj": "unexpected keyword argument 'k_channels'",
}
