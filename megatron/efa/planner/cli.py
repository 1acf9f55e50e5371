"""`megatron-efa plan`: the fastest layouts of a model on a cluster, with what limits each."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from megatron.efa.cluster.model import Cluster
from megatron.efa.errors import EfaError
from megatron.efa.planner import from_config, machines, page, search, shape, write
from megatron.efa.planner.layout import DISPATCHERS, Job
from megatron.efa.planner.memory import GIB
from megatron.efa.planner.search import Plan
from megatron.efa.planner.time import RELEASES

_KEYS = {
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "vp": "parallel.virtual_pipeline_model_parallel_size",
    "mbs": "train.micro_batch_size",
}

_COLUMNS = ("step_s", "tokens_per_s_per_gpu", "mfu", "memory_gib", "gpu_hours", "days")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    parser.add_argument(
        "--model",
        required=True,
        help="a published model (kimi-k2, ...) or a YAML of Megatron arguments",
    )
    parser.add_argument(
        "--cluster", required=True,
        help="instance family (p5, p5en, p6-b200, p6-b300), or the YAML of a cluster",
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, help="nodes (default: all that the YAML lists)")
    parser.add_argument("--seq", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--gbs", type=int, help="sequences in a step (default: 8 per GPU)")
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp32"), default="bf16")
    parser.add_argument(
        "--tokens", default="15T", help="length of the training, for cost (15T, 500B)"
    )
    parser.add_argument(
        "--fix", action="append", default=[], metavar="parallel.tp=1",
        help="hold one of tp, pp, vp, cp, ep, mbs, dispatcher, recompute, ep_overlap; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--imbalance", type=float, default=1.0, help="busiest experts over the mean"
    )
    parser.add_argument(
        "--release", choices=RELEASES, default="plain",
        help="software whose host and kernel times are assumed (docs/planner.md)",
    )  # fmt: skip
    parser.add_argument("--top", type=int, default=10, help="layouts to list")
    parser.add_argument("--explain", action="store_true", help="the best layout term by term")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the same with plots")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.yaml", help="config for pretrain_gpt.py"
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print; return the exit code."""
    is_file = args.model.endswith(".yaml")
    model = from_config.shape_of(Path(args.model)) if is_file else shape.find(args.model)
    machine, cluster = machines.of_word(args.cluster)
    gpus = _nodes(args, cluster) * machine.node
    base = Job(
        gpus, args.seq, args.gbs or 8 * gpus, precision=args.precision,
        release=args.release, imbalance=args.imbalance,
    )  # fmt: skip
    plans = search.search(model, base, machine, fixed(args.fix))
    tokens = amount(args.tokens)
    figures = [plan.figures(model, machine, tokens) for plan in plans[: args.top]]
    if args.json:
        print(json.dumps(_json(plans[: args.top], figures), indent=1))
    else:
        print(_table(plans, figures, model.name, args))
        print(why(plans))
        if args.explain:
            print(explain(model, plans[0]))
    if args.html:
        write.text(args.html, page.html(model, machine, plans[: args.top], figures))
    if args.write:
        on_cpus = machine.measured is not None and machine.measured.synchronous
        kind = args.cluster if cluster is None else cluster.nodes[0].kind
        write.config(args.write, model, plans[0].job, kind, "cpu" if on_cpus else "gpu")
    return 0


def _nodes(args: argparse.Namespace, cluster: Cluster | None) -> int:
    """Nodes to plan for. Raises EfaError if not said, or more than the cluster has."""
    have = len(cluster.nodes) if cluster else None
    if args.nodes is None and have is None:
        raise EfaError(f"--nodes is missing: say how many {args.cluster} nodes the job gets")
    args.nodes = have if args.nodes is None else args.nodes
    if args.nodes < 1:
        raise EfaError(f"--nodes {args.nodes}: give at least one node")
    if have is not None and args.nodes > have:
        raise EfaError(f"--nodes {args.nodes}: {args.cluster} lists {have} nodes")
    return args.nodes


def amount(text: str) -> float:
    """15T, 500B or a plain number of tokens. Raises EfaError."""
    units = {"T": 1e12, "B": 1e9, "M": 1e6}
    try:
        value = float(text.rstrip("TBMtbm")) * units.get(text[-1:].upper(), 1.0)
    except ValueError:
        raise EfaError(f"--tokens {text}: write a number such as 15T or 500B") from None
    if not value > 0:
        raise EfaError(f"--tokens {text}: must be above zero")
    return value


def fixed(words: list[str]) -> dict[str, object]:
    """What --fix holds, by field of a job. Raises EfaError for a word that is none."""
    out: dict[str, object] = {}
    for word in words:
        key, _, value = word.partition("=")
        name = key.removeprefix("parallel.").removeprefix("train.")
        name = next((short for short, long in _KEYS.items() if long.endswith(f".{name}")), name)
        if name in _KEYS and value.isdigit() and int(value) > 0:
            out[name] = int(value)
        elif name == "dispatcher" and value in DISPATCHERS:
            out[name] = value
        elif name == "recompute":
            out[name] = frozenset(part for part in value.split("+") if part not in ("", "none"))
        elif name == "ep_overlap" and value in ("true", "false"):
            out[name] = value == "true"
        else:
            known = ", ".join((*_KEYS, "dispatcher", "recompute", "ep_overlap"))
            raise EfaError(f"--fix {word}: write NAME=VALUE with one of {known}")
    return out


def _table(plans: list[Plan], figures: list[dict], model: str, args: argparse.Namespace) -> str:
    lines = [
        f"{model} on {args.nodes} {args.cluster} nodes, {args.precision}, sequence {args.seq}, "
        f"{plans[0].job.gbs} sequences a step; {len(plans)} layouts fit.",
        "Predictions, not measurements: docs/planner.md has their errors.",
        f"{'step s':>8} {'tok/s/GPU':>10} {'MFU':>6} {'GiB':>6} {'GPU-hours':>11} {'days':>7}"
        "  layout",
    ]
    for plan, f in zip(plans, figures, strict=False):
        lines.append(
            f"{f['step_s']:>8.2f} {f['tokens_per_s_per_gpu']:>10.0f} {f['mfu']:>6.1%} "
            f"{f['memory_gib']:>6.0f} {f['gpu_hours']:>11.4g} {f['days']:>7.1f}  "
            f"{search.describe(plan.job)}"
        )
    return "\n".join(lines)


def why(plans: list[Plan]) -> str:
    """Best and runner-up side by side: the terms that differ most."""
    if len(plans) < 2:
        return ""
    best, next_ = plans[0], plans[1]
    lines = [f"{'seconds':<12} {'best':>8} {'next':>8} {'gain':>8}"]
    for name in sorted(best.parts, key=lambda n: -abs(next_.parts[n] - best.parts[n])):
        gain = next_.parts[name] - best.parts[name]
        lines.append(f"{name:<12} {best.parts[name]:>8.3f} {next_.parts[name]:>8.3f} {gain:>+8.3f}")
    gain = next_.seconds - best.seconds
    lines.append(f"{'step':<12} {best.seconds:>8.3f} {next_.seconds:>8.3f} {gain:>+8.3f}")
    return "\n".join(lines)


def explain(model: shape.Shape, plan: Plan) -> str:
    """One layout: every term of its step and of its fullest stage's memory, and FLOPs."""
    job, used = plan.job, plan.usage
    rows = job.gbs * job.seq
    model_flops = model.flops_per_token(job.seq) * rows
    again = replace(job, recompute=frozenset())
    lines = [f"\n{search.describe(job)}", f"  {'step':<24} {plan.seconds:9.3f} s"]
    lines += [
        f"  {name:<24} {value:9.3f} s {value / plan.seconds:6.1%}"
        for name, value in plan.parts.items()
    ]
    lines.append(f"  memory of stage {used.stage:<8} {used.total / GIB:9.1f} GiB")
    for name in ("weights", "gradients", "optimizer", "activations", "buffers", "overhead"):
        lines.append(f"  {name:<24} {getattr(used, name) / GIB:9.1f} GiB")
    ratio = search.hardware_flops(model, job) / search.hardware_flops(model, again)
    lines.append(
        f"  model FLOPs {model_flops:.4g} a step, hardware FLOPs {model_flops * ratio:.4g}"
    )
    return "\n".join(lines)


def _json(plans: list[Plan], figures: list[dict]) -> list[dict]:
    out = []
    for plan, f in zip(plans, figures, strict=True):
        job = {k: v for k, v in vars(plan.job).items() if k != "recompute"}
        out.append(
            {"layout": job | {"recompute": sorted(plan.job.recompute)}}
            | f
            | {"seconds": plan.parts, "memory_bytes": vars(plan.usage)}
        )
    return out
