"""The planner's prediction for a job that is given as Megatron's arguments."""

from argparse import Namespace

from megatron.efa.planner import dryrun, fit, from_config, memory, search
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import Machine
from megatron.efa.planner.published import Run
from megatron.efa.planner.search import Plan
from megatron.efa.planner.shape import Shape


def of_args(args: Namespace, machine: Machine) -> tuple[Shape, Plan]:
    """Step and memory of the parsed and checked `args` on `machine`.

    Layers stand on stages as the planner would put them, whatever layout the arguments give.
    """
    shape, job = from_config.of_args(args)
    usage = memory.fullest(shape, job, dryrun.states_of(args))
    return shape, search.evaluate(shape, [job], machine, [usage])[0]


def inter_node_bytes(shape: Shape, job: Job, machine: Machine) -> float:
    """Bytes that all ranks send to other nodes in a step, as payload of the exchanges."""
    w = fit.table([Run({}, shape, job, machine, 1.0)]).work
    exchanges = (w.ep_far + w.tp_far + w.cp_far) / w.stages
    boundaries = 2 * w.pp_bytes * w.chunks * (w.stages - 1) / w.stages * w.pp_far
    each = (exchanges + boundaries) * w.microbatches + w.dp_far
    return float(each[0]) * job.gpus


def fits(plan: Plan, machine: Machine) -> str:
    """One line: what the fullest stage needs of a GPU's memory."""
    need, have = plan.usage.total / memory.GIB, machine.memory / memory.GIB
    verdict = "fits" if need <= have * (1 - search.RESERVE) else "does NOT fit"
    return f"stage {plan.usage.stage} needs {need:.1f} of {have:.1f} GiB: {verdict}"
