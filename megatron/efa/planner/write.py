"""A planned layout as the YAML that pretrain_gpt.py reads."""

import os
from pathlib import Path

from megatron.efa.aside import beside
from megatron.efa.cluster import catalogue
from megatron.efa.config.compose import EXAMPLES
from megatron.efa.errors import EfaError
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import host_of
from megatron.efa.planner.pipeline import layout
from megatron.efa.planner.shape import Shape


def text(path: Path, content: str) -> None:
    """Write `content` whole or not at all. Raises EfaError."""
    try:
        with beside(path) as folder:
            (folder / path.name).write_text(content)
            os.replace(folder / path.name, path)
    except OSError as error:
        raise EfaError(f"{path}: cannot be written: {error.strerror}") from error


def config(path: Path, shape: Shape, job: Job, cluster: str, engine: str = "gpu") -> None:
    """Write the config of `job`. Raises EfaError if the project has no example of the model."""
    if path.suffix != ".yaml":
        raise EfaError(f"--write {path}: the name of a config file must end in .yaml")
    if not (EXAMPLES / f"model/{shape.name}.yaml").is_file():
        have = sorted(file.stem for file in (EXAMPLES / "model").glob("*.yaml"))
        raise EfaError(
            f"--write: there is no examples/model/{shape.name}.yaml to name in the config; "
            f"models with one are {', '.join(have)}"
        )
    text(path, render(shape, job, cluster, engine))


def render(shape: Shape, job: Job, cluster: str, engine: str = "gpu") -> str:
    """The config's text; `engine` names a file of examples/cluster."""
    lines = [
        f"# {shape.name} on {job.gpus} GPUs ({cluster}), planned by `megatron-efa plan`.",
        "defaults:",
        f"  - /model: {shape.name}",
        *(f"  - /{group}: {name}" for group, name in _DEFAULTS),
        f"  - /cluster: {engine}",
        "  - _self_",
        "",
        "model:",
        f"  max_position_embeddings: {job.seq}",
        *([f"  moe_token_dispatcher_type: {job.dispatcher}"] if shape.experts else []),
        "",
        "data:",
        f"  vocab_size: {shape.vocab}",
        f"  seq_length: {job.seq}",
        "",
        "train:",
        f"  micro_batch_size: {job.mbs}",
        f"  global_batch_size: {job.gbs}",
        *_recompute(job),
        "",
        "parallel:",
        *_parallel(shape, job),
    ]
    if job.precision == "fp8":
        recipe = "mxfp8" if "b" in cluster else "blockwise"
        lines += ["", "cluster:", "  fp8: e4m3", f"  fp8_recipe: {recipe}"]
    if cluster in {word for kind in catalogue.kinds() for word in (kind, kind.split(".")[0])}:
        host = host_of(cluster)
        lines += ["", "launch:", f"  kind: {host.kind}", f"  nodes: {job.gpus // host.gpus}"]
    return "\n".join(lines) + "\n"


_DEFAULTS = (
    ("data", "mock"),
    ("train", "pretrain"),
    ("parallel", "data"),
)


def _recompute(job: Job) -> list[str]:
    if "full" in job.recompute:
        return [
            "  recompute_granularity: full",
            "  recompute_method: uniform",
            "  recompute_num_layers: 1",
        ]
    if not job.recompute:
        return []
    return [
        "  recompute_granularity: selective",
        f"  recompute_modules: [{', '.join(sorted(job.recompute))}]",
    ]


def _parallel(shape: Shape, job: Job) -> list[str]:
    lines = [f"  pipeline_model_parallel_size: {job.pp}"]
    if job.tp > 1:
        lines += [f"  tensor_model_parallel_size: {job.tp}", "  sequence_parallel: true"]
    if job.cp > 1:
        lines.append(f"  context_parallel_size: {job.cp}")
    if shape.experts:
        lines += [
            f"  expert_model_parallel_size: {job.ep}",
            f"  expert_tensor_parallel_size: {job.etp}",
        ]
    if job.pp > 1:
        lines.append(
            f'  pipeline_model_parallel_layout: "{layout(shape, job.pp, job.vp, job.seq)}"'
        )
    if job.ep_overlap:
        lines.append("  overlap_moe_expert_parallel_comm: true")
    lines += ["  overlap_grad_reduce: true", "  overlap_param_gather: true"]
    return lines
