"""Seconds of a training step from its work: a few rates, everything else is counted.

    microbatch = p-norm(GPU, host) of one stage, GPU = compute + exposed communication
    step = microbatch x (microbatches + (stages - 1) / chunks) + data parallel + optimizer + fixed

Works on floats and on arrays of rows alike. The constants and how they were fitted:
docs/planner.md.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

SHARPNESS = 4.0
"""Of the maximum of GPU time and host time: 4 makes two equal times 19 % longer than one."""


@dataclass(frozen=True)
class Conditions:
    """Of one run (or an array of runs): rates, and the switches that pick constants."""

    peak: Any
    """FLOP/s of the run's GEMM precision."""
    peak16: Any
    memory_rate: Any
    near: Any
    far: Any
    low: Any
    """1 where GEMMs run in 8 or 4 bits."""
    hopper: Any
    ultra: Any
    """1 on B300 and GB300, whose exponentials run at twice the rate of B200's."""
    efa_v2: Any
    """1 on p5: EFA of the second generation and its slower hosts."""
    indexer: Any
    """1 for sparse attention, whose indexer has no fused kernels."""
    fused: Any
    """1 where the experts' GEMMs, gated activation and quantisation are one kernel."""
    alltoall: Any
    """1 for NCCL all-to-alls whose sizes the host must know, flat or on two levels."""
    proxy: Any
    overlap: Any
    natural: Any
    imbalance: Any
    drop: Any
    release: Any
    """Names in RELEASES: which relative host and GPU times of the software hold."""


RELEASES = ("2025", "2026.02", "2026.04", "2026.06", "plain", "automodel", "proxy", "functional")
"""2025 to 2026.06: tuned runs in NVIDIA's containers of that time (later ones count as 2026.06).
plain: Megatron as it comes, no CUDA graphs (the AWS runs). automodel: PyTorch FSDP2.
proxy: few-layer proxies on one node. functional: real data, natural routing, not tuned."""


def _by_release(k: dict[str, float], what: str, release: Any) -> Any:
    if isinstance(release, str):
        return k[f"{what}_{release}"]
    return np.array([k[f"{what}_{name}"] for name in release])


def soft_max(a: Any, b: Any) -> Any:
    return (a**SHARPNESS + b**SHARPNESS) ** (1 / SHARPNESS)


def breakdown(w: Any, c: Conditions, k: dict[str, float]) -> dict[str, Any]:
    """Seconds of one step by cause; the values sum to the step.

    `w` is a Work, `k` the constants. Keys: compute, attention, memory (bound), experts (their
    GEMMs),
    ep_near, ep_far, tp, cp, pp, host (launches that the GPU waits for), bubble, dp, optimizer,
    other.
    """
    stage = w.uneven / w.stages
    gemm = k["gemm_low"] ** c.low * k["gemm_16"] ** (1 - c.low)
    gemm = gemm * k["gemm_hopper"] ** c.hopper
    attention_rate = c.peak16 * k["attention"] * k["attention_ultra"] ** c.ultra
    experts_rate = c.peak * gemm * k["expert_gemm"] / (1 + k["expert_rows"] / w.expert_rows)
    skew = k["natural"] ** c.natural * c.imbalance
    thin = k["drop"] ** c.drop * k["fused"] ** c.fused
    kernel, host_factor = _by_release(k, "kernel", c.release), _by_release(k, "host", c.release)
    t = {
        "compute": w.gemm / (c.peak * gemm) + w.head / (c.peak16 * k["gemm_16"]),
        "experts": w.expert_gemm / experts_rate * skew * thin,
        "attention": w.attention / attention_rate,
        "memory": (
            w.elementwise
            + w.heads * k["heads"]
            + (w.permute * k["permute"] + w.unfused * k["unfused"]) * skew * thin
            + w.scan * k["scan"]
            + w.weights * k["weights"]
        )
        / (c.memory_rate * k["memory"]),
    }
    kernel = kernel * k["indexer"] ** c.indexer
    t = {name: value * stage * kernel for name, value in t.items()}
    compute = sum(t.values())
    wire = k["wire_alltoall"] * c.alltoall + k["wire_library"] * (1 - c.alltoall)
    near = w.ep_near / (c.near * k["near"]) * stage
    far = w.ep_far / (c.far * wire) * stage
    rows = w.ep_rows * c.proxy / (k["proxy_rows"] * 1e6 * k["proxy_v2"] ** c.efa_v2) * stage
    sync = w.ep_calls * k["exchange"] * 1e-3 * (c.alltoall + k["proxy_call"] * c.proxy) * stage
    hidden = 1 - k["overlap"] * c.overlap
    t["ep_near"] = near * hidden * skew
    t["ep_far"] = (far + rows) * hidden * skew + sync * hidden
    t["tp"] = k["tp"] * (w.tp_near / c.near + w.tp_far / c.far) * stage
    t["cp"] = 0.3 * (w.cp_bytes / (c.near * k["near"]) + w.cp_far / (c.far * 0.8)) * stage
    t["pp"] = 0.2 * w.pp_bytes * w.chunks * 2 / (c.far * 0.8)
    sharded = (w.fsdp_near / (c.near * k["near"]) + w.fsdp_far / (c.far * 0.8)) * stage
    t["dp"] = np.maximum(sharded - k["fsdp"] * compute, 0.1 * sharded)
    gpu = sum(t.values())
    launches = (w.blocks * k["host_block"] + w.moe_blocks * k["host_moe"]) * stage
    launches = launches + w.sends * k["host_send"]
    launches = launches * k["drop_host"] ** c.drop
    host = launches * 1e-3 * host_factor * k["host_v2"] ** c.efa_v2
    t["host"] = soft_max(gpu, host) - gpu
    microbatch = sum(t.values())
    t = {name: value * w.microbatches for name, value in t.items()}
    t["bubble"] = microbatch * (w.stages - 1) / w.chunks
    sent = w.dp_near / (c.near * k["near"]) + w.dp_far / (c.far * 0.8)
    t["dp"] = t["dp"] + np.maximum(sent - 0.6 * compute, 0.1 * sent)
    t["optimizer"] = w.optimizer / (c.memory_rate * k["memory"])
    t["other"] = k["fixed"] + 0 * t["optimizer"]
    return t


def step(w: Any, c: Conditions, k: dict[str, float]) -> Any:
    """Seconds of one step."""
    return sum(breakdown(w, c, k).values())


def exposed(parts: dict[str, Any]) -> Any:
    """Seconds of communication that computation does not hide."""
    return sum(np.asarray(parts[name]) for name in ("ep_near", "ep_far", "tp", "cp", "pp", "dp"))
