"""NCCL options of a group: what upstream's communicator config says, and more keys than it knows.

The file of `--nccl-communicator-config-path` maps an axis ("ep", "dp_cp", ...) to options. Upstream
reads five of them and lets only "ib" and "socket" be a `net_name`. Here each option that torch has
can be given, the name of any network plugin (aws-ofi-nccl calls itself "AWS Libfabric"), and keys
for our parts: `ep_rail`, `ep_intra`, or with a purpose in the place of the axis.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.efa.config.nearest import hint
from megatron.efa.errors import EfaError
from megatron.efa.groups.axes import KEYS

TIERS = ("intra", "rail")

UPSTREAMS = ("is_high_priority_stream", "cga_cluster_size", "max_ctas", "min_ctas", "net_name")
OURS = (
    "blocking",
    "collnet_enable",
    "cta_policy",
    "max_p2p_peers",
    "nvls_ctas",
    "split_share",
    "traffic_class",
)
"""Fields of torch's `ProcessGroupNCCL.NCCLConfig` that upstream ignores."""

_configs: Mapping[str, Mapping[str, Any]] = {}


def complete(options: Any, wanted: Mapping[str, Any]) -> bool:
    """Set in NCCL `options` those keys of `wanted` that upstream does not know.

    True if nothing is left for upstream to do: it would refuse the `net_name`. Raises EfaError for
    a key or a value that this PyTorch does not take.
    """
    for key in OURS:
        if key in wanted:
            _set(options.config, key, wanted[key])
    name = wanted.get("net_name")
    if name is None or str(name).lower() in ("ib", "socket"):
        return False
    _set(options.config, "net_name", name)
    return True


def _set(config: Any, key: str, value: Any) -> None:
    if not hasattr(config, key):
        raise EfaError(
            f"this PyTorch has no NCCL option {key}: take it out of the communicator config, or "
            "install a newer PyTorch"
        )
    try:
        setattr(config, key, value)
    except TypeError as error:
        raise EfaError(
            f"NCCL option {key} cannot be {value!r}: give it as nccl.h's ncclConfig_t does"
        ) from error


def remember(configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Take the options of parts from `configs`: axis or part -> options."""
    global _configs
    _configs = configs


def of_part(axis: str, purpose: str, tier: str) -> Any | None:
    """Return NCCL options for a part, None where none are asked for.

    Those of its axis, then of `AXIS_TIER`, then of `PURPOSE_TIER`; the last one to name a key
    counts.
    """
    merged: dict[str, Any] = {}
    for key in (axis, f"{axis}_{tier}", f"{purpose}_{tier}"):
        merged |= _configs.get(key) or {}
    if not merged:
        return None
    from megatron.core.parallel_state import get_nccl_options

    return get_nccl_options("part", {"part": merged})


def check(path: str, purposes: list[str]) -> None:
    """Raise EfaError if the communicator config at `path` has a key that nothing would read."""
    import yaml

    try:
        configs = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise EfaError(f"cannot read the communicator config {path}: {reason}") from error
    axes = sorted(set(KEYS.values()))
    groups = [*axes, *(f"{name}_{tier}" for name in [*axes, *purposes] for tier in TIERS)]
    if not isinstance(configs, dict):
        raise EfaError(
            f"{path}: expected groups, each with NCCL options, as in `ep: {{max_ctas: 8}}`"
        )
    for group, options in configs.items():
        if group not in groups:
            raise EfaError(f"{path}: there is no group {group!r}{hint(str(group), groups)}")
        if not isinstance(options, dict):
            raise EfaError(
                f"{path}: {group} must be NCCL options, as in `{group}: {{max_ctas: 8}}`"
            )
        for key in options:
            if key not in UPSTREAMS + OURS:
                raise EfaError(
                    f"{path}: {group}: there is no NCCL option {key!r}"
                    f"{hint(str(key), UPSTREAMS + OURS)}"
                )
