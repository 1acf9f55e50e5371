"""Rates of a cluster that `megatron-efa calibrate` has measured: curves by size, between points."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from megatron.efa.cluster.model import Cluster, Compute, Link, Points
from megatron.efa.errors import EfaError

COLLECTIVES = ("alltoall", "allgather", "reducescatter", "sendrecv")


@dataclass(frozen=True)
class Measured:
    """A calibrated cluster's rates."""

    near: Link | None
    """None with one rank a node."""
    far: Link | None
    """None with one node."""
    compute: Compute

    @property
    def synchronous(self) -> bool:
        return self.compute.kind == "cpu"

    def seconds(self, tier: str, collective: str, size: Any, calls: Any = 1.0) -> Any:
        """Of `calls` calls that send `size` bytes in all, a rank; 0 where nothing is sent."""
        link = self.near if tier == "near" else self.far
        each = np.asarray(size, float) / np.maximum(calls, 1e-9)
        if not np.any(each > 0):
            return 0.0 * each
        if link is None:
            where = "inside its nodes" if tier == "near" else "between its nodes"
            raise EfaError(f"the cluster was not calibrated {where}: calibrate all of it")
        curve = dict(link.curves)[collective]
        return np.where(each > 0, np.maximum(calls, 1e-9) * time_of(curve, each), 0.0)

    def dispatch(self, dispatcher: Any) -> Any:
        """Seconds of an expert layer's exchanges beside their bytes, by dispatcher; others as
        upstream's all-to-all."""
        known = dict(self.compute.dispatch)
        plain = known.get("alltoall", 0.0)
        return np.array([known.get(name, plain) for name in np.atleast_1d(dispatcher).tolist()])

    def rate(self, precision: Any, flops: Any) -> Any:
        """FLOP/s of a GEMM of `flops`. Raises EfaError for a precision that was not measured."""
        curves = dict(self.compute.gemm)
        names = sorted(set(np.atleast_1d(precision).tolist()))
        missing = [name for name in names if name not in curves]
        if missing:
            raise EfaError(
                f"the cluster was not calibrated in {missing[0]}, only in {', '.join(curves)}: "
                "calibrate it with --precision, or plan in one of these"
            )
        found = np.asarray(flops, float) * 0.0
        for name in names:
            found = np.where(np.asarray(precision) == name, _along(curves[name], flops), found)
        return found


def of(cluster: Cluster) -> Measured | None:
    """The rates of `cluster`; None where it was not calibrated."""
    if cluster.compute is None:
        return None
    for tier, link in (("near", cluster.near), ("far", cluster.far)):
        missing = set(COLLECTIVES) - {name for name, _ in link.curves} if link else set()
        if link and link.curves and missing:
            raise EfaError(f"{cluster.source}: {tier}.curves has no {', '.join(sorted(missing))}")
    near, far = (link if link and link.curves else None for link in (cluster.near, cluster.far))
    return Measured(near, far, cluster.compute)


def time_of(curve: Points, size: Any) -> Any:
    """Seconds of a call of `size` bytes: between points straight in logarithms, below the first as
    long as the first, above the last in proportion."""
    sizes, seconds = _columns(curve)
    inside = _along(curve, size)
    return np.where(
        np.asarray(size) > sizes[-1], seconds[-1] * np.asarray(size) / sizes[-1], inside
    )


@cache
def _columns(curve: Points) -> tuple[np.ndarray, np.ndarray]:
    return np.array([a for a, _ in curve]), np.array([b for _, b in curve])


def _along(curve: Points, at: Any) -> Any:
    sizes, values = _columns(curve)
    return np.exp(np.interp(np.log(np.maximum(at, 1e-9)), np.log(sizes), np.log(values)))
