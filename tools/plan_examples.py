"""Plan the configs of examples/trillion anew: their YAML, a page of each plan, the README's table.

tools/plan_examples.py            # a minute; after the planner's constants or memory have changed
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.efa.config.compose import EXAMPLES
from megatron.efa.errors import EfaError
from megatron.efa.planner import cli, machines, memory, search, write
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import Machine
from megatron.efa.planner.search import Plan
from megatron.efa.planner.shape import Shape, find

FOLDER = EXAMPLES / "trillion"
TOKENS = 15e12
FIXED = {"dispatcher": "hierarchical"}


@dataclass(frozen=True)
class Example:
    """What one config is planned for."""

    model: str
    cluster: str
    nodes: int
    gbs: int
    precision: str = "bf16"

    @property
    def name(self) -> str:
        return f"{self.model}-{self.cluster}"

    @property
    def command(self) -> str:
        fp8 = " --precision fp8" if self.precision == "fp8" else ""
        return (
            f"megatron-efa plan --model {self.model} --cluster {self.cluster} --nodes {self.nodes} "
            f"--gbs {self.gbs}{fp8} --fix dispatcher=hierarchical --explain"
        )


PLANNED = (
    Example("deepseek-v3", "p5en", 128, 8192),
    Example("deepseek-v3", "p6-b200", 64, 4096, "fp8"),
    Example("efa-1t", "p5en", 256, 16384),
    Example("efa-1t", "p6-b300", 128, 8192),
    Example("kimi-k2", "p5en", 128, 8192),
    Example("kimi-k2", "p6-b300", 64, 4096, "fp8"),
    Example("ling-1t", "p6-b200", 128, 8192),
    Example("qwen3-235b-a22b", "p5en", 16, 1024),
    Example("qwen3-30b-a3b", "p5", 2, 256),
)

HEAD = """\
# Trillion-parameter pretraining, planned

Each config is what `megatron-efa plan --write` gave; its page has the command, the terms of its
step and the memory of its stages. `megatron-efa dry-run` accepts every one and counts the
published number of parameters. Step times are **predictions**
([docs/planner.md](../../docs/planner.md) has their errors), for 15T tokens, under the release
`plain`; nothing here was run at its size. Data are made up: name your own with `data=...`.

    torchrun --nnodes 128 ... pretrain_gpt.py --config examples/trillion/kimi-k2-p5en.yaml

`tools/train_twins.py` trains a scaled-down twin of each, the same code path in small sizes, on
two emulated nodes. `tools/plan_examples.py` plans all of them anew.

`efa-1t` is shaped for EFA: experts in 8 groups of which a token reaches 3, so that with EP64 a
group is a node and a token crosses the network to at most 3 nodes; 256 experts divide by every EP
group up to 256 GPUs; rows of 16 KiB.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Plan and write; return the exit code."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    rows = ["| config | GPUs | precision | batch | parameters | step s | tokens/s/GPU | MFU | GiB "
            "| days | layout |", "| --- " * 11 + "|"]  # fmt: skip
    try:
        for example in PLANNED:
            rows.append(_write(example))
            print(rows[-1])
        write.text(FOLDER / "README.md", HEAD + "\n".join(rows) + "\n")
    except EfaError as error:
        print(f"plan_examples.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _write(example: Example) -> str:
    """Write the config and its page; return its row of the table."""
    shape, machine = find(example.model), machines.of_kind(example.cluster)
    base = Job(example.nodes * machine.node, 4096, example.gbs, precision=example.precision)
    plans = search.search(shape, base, machine, FIXED)
    best, f = plans[0], plans[0].figures(shape, machine, TOKENS)
    write.config(FOLDER / f"{example.name}.yaml", shape, best.job, example.cluster)
    write.text(FOLDER / f"{example.name}.md", _page(example, shape, machine, plans))
    return (
        f"| [{example.name}]({example.name}.md) | {best.job.gpus} | {example.precision} "
        f"| {example.gbs} | {shape.params(mtp=True) / 1e9:.1f}B | {f['step_s']:.2f} "
        f"| {f['tokens_per_s_per_gpu']:.0f} | {f['mfu']:.1%} | {f['memory_gib']:.0f} "
        f"| {f['days']:.1f} | {search.describe(best.job)} |"
    )


def _page(example: Example, shape: Shape, machine: Machine, plans: list[Plan]) -> str:
    best = plans[0]
    stages = [memory.usage(shape, best.job, stage) for stage in range(best.job.pp)]
    names = ("weights", "gradients", "optimizer", "activations", "buffers", "overhead", "total")
    table = ["| stage | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for used in stages:
        figures = " | ".join(f"{getattr(used, name) / memory.GIB:.1f}" for name in names)
        table.append(f"| {used.stage} | {figures} |")
    terms = "\n".join(f"    {line}" for line in cli.explain(shape, best).strip().splitlines())
    why = "\n".join(f"    {line}" for line in cli.why(plans).splitlines())
    return (
        f"# {example.name}: its plan\n\n"
        f"{shape.name} on {best.job.gpus} GPUs ({example.nodes} {example.cluster} nodes), "
        f"{example.precision}. All figures are predictions of\n\n    {example.command}\n\n"
        f"with [docs/planner.md](../../docs/planner.md)'s errors; nobody has run it.\n\n"
        f"    megatron-efa dry-run --world-size {best.job.gpus} "
        f"--config examples/trillion/{example.name}.yaml\n"
        f"    torchrun --nnodes {example.nodes} ... pretrain_gpt.py "
        f"--config examples/trillion/{example.name}.yaml\n\n"
        f"## One step\n\n{terms}\n\n"
        f"## Memory by stage, GiB of {machine.memory / memory.GIB:.0f}\n\n"
        + "\n".join(table)
        + f"\n\n## Against the runner-up\n\n    {search.describe(plans[1].job)}\n\n{why}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
