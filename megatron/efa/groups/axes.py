"""Upstream's names for its process groups: each one's description, and its key in config files."""

import re
from typing import Any

WORLD = "world"

KEYS = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP": "hcp",
    "HYBRID_DP_CP_GROUP": "dp_cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "MODEL_PARALLEL_GROUP": "mp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "ep_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep_mp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "ep_dp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": "intra_ep_dp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter_ep_dp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt_instance",
    "GTP_WEIGHT_REMAT_GROUP": "gtp_remat",
    "DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "gtp_remat_dp",
    "DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "gtp_remat_dp_cp",
    "EXPERT_GTP_WEIGHT_REMAT_GROUP": "expt_gtp_remat",
    "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "ep_gtp_remat_dp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_gtp_remat_pp",
}
"""`group_desc` -> key in the communicator config (`--nccl-communicator-config-path`)."""

# What else a description may say: a level, a size, or that it is the second communicator of its
# ranks, for all-gathers (_AG) or for host tensors (_GLOO).
_VARIANT = re.compile(r"_GLOO|_AG$|_L\d+$|_\d+$")
_PART = re.compile(r"efa:(?P<axis>[^:]*):(?P<purpose>[^:]*):(?P<tier>[^:]*)")


def axis_of(group: Any) -> str:
    """Name the axis of `group`: its key in upstream's communicator config ("ep", "dp_cp", ...).

    A part of ours has the axis of the group that it is a part of. "world" for None and the default
    group; for a group that neither upstream nor we made, its description.
    """
    described = _description(group)
    if part := _PART.fullmatch(described):
        return part["axis"]
    if described in ("", "default_pg"):
        return WORLD
    plain = re.sub("_GLOO", "", described)
    return KEYS.get(plain) or KEYS.get(_VARIANT.sub("", described)) or described


def tier_of(group: Any) -> str:
    """ "intra" or "rail" for a part of ours, "" for any other group."""
    part = _PART.fullmatch(_description(group))
    return part["tier"] if part else ""


def is_gloo_twin(group: Any) -> bool:
    """Whether upstream made `group` for host tensors, beside one of the same ranks."""
    return "_GLOO" in _description(group)


def part_description(axis: str, purpose: str, tier: str) -> str:
    """What the flight recorder shows of a part; `axis_of` and `tier_of` read it."""
    return f"efa:{axis}:{purpose}:{tier}"


def _description(group: Any) -> str:
    return "" if group is None else getattr(group, "group_desc", "")
