"""`megatron-efa dry-run`: what ranks of a real job hold, found on a laptop."""

import argparse
import json

from megatron.efa.errors import EfaError
from megatron.efa.planner import dryrun, machines, predict
from megatron.efa.planner.cli import explain
from megatron.efa.planner.dryrun import DryRun, RankReport
from megatron.efa.planner.search import Plan
from megatron.efa.planner.shape import Shape

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's flags; every other word is pretrain_gpt.py's."""
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks of the job (default: the cluster's)"
    )
    parser.add_argument(
        "--cluster",
        help="instance family or a cluster's YAML: say whether it fits there, and predict a step",
    )
    parser.add_argument(
        "--rank",
        default="all-distinct",
        help="a rank, or all-distinct (one of each pipeline stage)",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--config", help="YAML file, as pretrain_gpt.py takes it")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="overrides and Megatron's flags")


def run(args: argparse.Namespace) -> int:
    """Build and print; return the exit code."""
    machine, cluster = machines.of_word(args.cluster) if args.cluster else (None, None)
    if args.world_size is None and cluster is None:
        raise EfaError("--world-size is missing: say how many ranks the job has")
    world = cluster.world_size if args.world_size is None else args.world_size
    if world < 1:
        raise EfaError(f"--world-size {world}: must be at least 1")
    if machine is not None and world % machine.node:
        raise EfaError(f"--world-size {world}: {args.cluster} has nodes of {machine.node} ranks")
    if args.rank != "all-distinct" and not args.rank.isdigit():
        raise EfaError(f"--rank {args.rank}: give a rank or all-distinct")
    ranks = None if args.rank == "all-distinct" else [int(args.rank)]
    config = ["--config", args.config] if args.config else []
    words = [word for word in args.words if word != "--"]
    outcome = dryrun.run([*config, *words], world, ranks)
    planned = predict.of_args(outcome.args, machine) if machine else None
    if args.json:
        print(json.dumps(_json(outcome, planned), indent=1))
        return 0
    print(_text(outcome, machine.node if machine else None))
    if planned:
        print(f"predicted, not measured (docs/planner.md has the errors):{explain(*planned)}")
        print(f"  {predict.fits(planned[1], machine)}")
    return 0


def _json(outcome: DryRun, planned: tuple[Shape, Plan] | None) -> dict:
    told = {
        "total_parameters": outcome.total_parameters,
        "ranks": [report.as_dict() for report in outcome.ranks],
    }
    if planned:
        _, plan = planned
        told["predicted"] = {
            "step_s": plan.seconds,
            "seconds": plan.parts,
            "memory_bytes": vars(plan.usage),
        }
    return told


def _text(outcome: DryRun, node: int | None) -> str:
    a = outcome.args
    lines = [
        f"{a.world_size} ranks: tp {a.tensor_model_parallel_size}, cp {a.context_parallel_size}, "
        f"pp {a.pipeline_model_parallel_size}, ep {a.expert_model_parallel_size}, "
        f"dp {a.data_parallel_size}; Megatron accepts the arguments"
    ]
    if outcome.total_parameters:
        lines.append(f"{outcome.total_parameters:,} parameters in the whole model")
    lines.append(
        f"{'rank':>5} {'stage':>5} {'layers':>8} {'experts':>7} {'parameters':>15} "
        f"{'weights':>8} {'grads':>8} {'optim':>8}  GiB"
    )
    lines += [_row(report) for report in outcome.ranks]
    lines.append("parameters of the first rank by module:")
    lines += [f"  {name:<36} {size:>15,}" for name, size in outcome.ranks[0].modules.items()]
    lines.append("groups of the first rank (size: ranks):")
    for name, ranks in outcome.ranks[0].groups.items():
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        nodes = f"  on {len({rank // node for rank in ranks})} nodes" if node else ""
        lines.append(f"  {name:<8} {len(ranks):>5}: {shown}{nodes}")
    return "\n".join(lines)


def _row(r: RankReport) -> str:
    layers = f"{r.layers[0]}-{r.layers[-1]}" if r.layers else "-"
    return (
        f"{r.rank:>5} {r.pipeline_stage:>5} {layers:>8} {r.experts:>7} {r.parameters:>15,} "
        f"{r.weight_bytes / GIB:>8.2f} {r.gradient_bytes / GIB:>8.2f} "
        f"{r.optimizer_bytes / GIB:>8.2f}"
    )
