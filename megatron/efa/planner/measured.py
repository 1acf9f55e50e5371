"""Seconds of a step on a cluster that `megatron-efa calibrate` has measured.

The same work and the same terms as `time`, but rates come from the cluster's curves: a collective
of so many bytes takes what it took, a GEMM of so many FLOPs runs as fast as it did, a block costs
the host what it cost. Nothing of that is fitted to steps. On CPUs a rank computes and launches in
turn (only the network is asynchronous), so these times add up.
"""

from typing import Any

import numpy as np

from megatron.efa.planner.rates import Measured
from megatron.efa.planner.time import soft_max
from megatron.efa.planner.work import Work

OVERLAPPED = 0.6
"""Of the experts' exchanges, hidden with Megatron's overlap, until someone measures it."""


def breakdown(
    w: Work, precision: Any, dispatcher: Any, overlap: Any, imbalance: Any, m: Measured
) -> dict[str, Any]:
    """Seconds of one step by cause, as `time.breakdown` names them; the values sum to the step."""
    mean = 1 / w.stages  # of the layers; the fullest stage has logits besides, which send nothing
    stage = mean * w.uneven
    blocks = np.maximum(w.blocks, 1e-9)
    dense = m.rate(precision, w.gemm / blocks / 12)  # about four GEMMs, each three times
    experts = m.rate(precision, w.expert_gemm / np.maximum(w.moe_blocks * w.experts_here, 1) / 9)
    copy = m.compute.memory_rate
    t = {
        "compute": w.gemm / dense + w.head / m.rate(precision, w.head / 3),
        "experts": w.expert_gemm / experts * imbalance,
        "attention": w.attention / m.rate(precision, w.attention / blocks / 6),
        "memory": (w.elementwise + w.heads + w.permute * imbalance + w.scan + w.unfused) / copy,
    }
    t = {name: value * stage for name, value in t.items()}
    compute = sum(t.values())
    shown = (1 - OVERLAPPED * overlap) * imbalance * mean
    t["ep_near"] = m.seconds("near", "alltoall", w.ep_near, w.ep_calls) * shown
    t["ep_far"] = m.seconds("far", "alltoall", w.ep_far, w.ep_calls) * shown
    t["tp"] = m.seconds("near", "allgather", w.tp_near, w.tp_calls) * mean
    t["tp"] = t["tp"] + m.seconds("far", "allgather", w.tp_far, w.tp_calls) * mean
    t["cp"] = m.seconds("near", "sendrecv", w.cp_bytes) + m.seconds("far", "sendrecv", w.cp_far)
    t["cp"] = t["cp"] * mean
    sends = 2 * w.sends
    tier = np.where(w.pp_far > 0, 1.0, 0.0)
    sent = w.pp_bytes * sends
    t["pp"] = tier * m.seconds("far", "sendrecv", sent, sends)
    t["pp"] = t["pp"] + (1 - tier) * m.seconds("near", "sendrecv", sent, sends)
    gpu = sum(t.values())
    moe_block = m.compute.moe_block + m.compute.expert * w.experts_here
    moe_block = moe_block + m.dispatch(dispatcher) * (w.ep_calls > 0)
    host = (w.blocks * m.compute.block + w.moe_blocks * moe_block) * mean
    t["host"] = host if m.synchronous else soft_max(gpu, host) - gpu
    microbatch = sum(t.values())
    t = {name: value * w.microbatches for name, value in t.items()}
    t["bubble"] = microbatch * (w.stages - 1) / w.chunks
    sent = sum(
        m.seconds(tier, kind, size * share)
        for tier, size in (("near", w.dp_near), ("far", w.dp_far))
        for kind, share in (("reducescatter", w.reduce), ("allgather", 1 - w.reduce))
    )
    t["dp"] = np.maximum(sent - 0.6 * compute, 0.1 * sent)
    t["optimizer"] = w.optimizer / copy
    t["other"] = m.compute.step + 0 * t["optimizer"]
    return t
