"""`megatron-efa bench step`: training steps with each of our paths off, alone, and all together.

Every arm is `pretrain_gpt.py` on the same emulated nodes, data and seed; arms take turns, round by
round, and their losses are compared. docs/bench.md says what is measured.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.efa.bench import report
from megatron.efa.errors import EfaError

PATHS = {
    "expert": ("--moe-token-dispatcher-type", "hierarchical"),
    "data": ("--efa-data-parallel", None),
    "pipeline": ("--efa-pipeline", None),
    "tensor": ("--efa-tensor", None),
}
"""Each path's switch, and the value that turns it on; None: see `_on`."""

ASIDE = {"groups": ("--efa-groups",), "traffic": ("--efa-traffic-interval", "1")}
"""Arms that change no path: not among `each` and `all`."""

_OFF = ("off", "flat", "none", "upstream", "auto", "false")

# Small experts and many of them, so that the network and not this machine's CPUs is the limit.
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 512 --ffn-hidden-size 512 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--num-experts 32 --moe-router-topk 8 --moe-ffn-hidden-size 32 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--make-vocab-size-divisible-by 32 --micro-batch-size 1 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 0 "
    "--lr-decay-iters 100 --weight-decay 0.1 --clip-grad 1 --seed 1234 --log-interval 1 "
    "--eval-iters 0 --eval-interval 1000 --num-workers 0 --distributed-timeout-minutes 5 "
    "--no-check-for-nan-in-loss-and-grad"
)

MADE_UP_DATA = shlex.split("--mock-data --tokenizer-type NullTokenizer --vocab-size 1023")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa bench step`."""
    option = parser.add_argument
    option("--nodes", type=int, default=4, help="nodes (default: 4)")
    option("--ranks-per-node", type=int, default=2, help="ranks a node (default: 2)")
    option("--rate", default="200mbit", help="rate of each node's link (default: 200mbit)")
    option(
        "--arms",
        default="off,each,all",
        help="off, each, all, or paths joined by +, like off,expert,expert+data "
        "(default: off,each,all)",
    )
    option("--steps", type=int, default=4, help="measured steps of a turn (default: 4)")
    option("--warm-up", type=int, default=2, help="steps of a turn before them (default: 2)")
    option("--rounds", type=int, default=3, help="turns of each arm (default: 3)")
    option("--record-routing", type=Path, help="write what a router chose, for `bench expert`")
    option("--gpu", action="store_true", help="NCCL on this machine's GPUs, shared by the ranks")
    option("--timeout", type=float, default=900, help="seconds that one turn may take")
    option("--out", type=Path, help="folder of records, figure and logs (default: runs/bench/...)")
    option(
        "flags",
        nargs=argparse.REMAINDER,
        help="-- Megatron's flags, which win over the small MoE that is trained otherwise",
    )


@dataclass(frozen=True)
class Arm:
    """A set of paths that are on, and the flags that turn them on."""

    name: str
    flags: tuple[str, ...]


def run(args: argparse.Namespace) -> int:
    """Train all arms in turns; returns 0, or 1 if the losses of an arm are not those of `off`."""
    for name in ("steps", "warm_up", "rounds"):
        if getattr(args, name) < 1:
            raise EfaError(f"--{name.replace('_', '-')} {getattr(args, name)} is not 1 or more")
    out = report.Folder(args.out, "step")
    from megatron.efa.bench import step_rank, step_records

    step_rank.preload(args.gpu)
    switches = _switches()
    arms = parse_arms(args.arms, switches)
    extra = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    seen = _take_turns(args, arms, _flags(args, extra), out)
    records = step_records.records_of(args, arms, seen)
    print(step_records.table(records))
    path = out.write_records(records, rate=args.rate, flags=extra)
    print(f"records: {path}")
    figure = out.write_figure(lambda pyplot: step_records.draw(pyplot, records))
    print("" if figure is None else f"figure:  {figure}")
    if args.record_routing is not None:
        step_records.save_routing(args.record_routing, seen[0][0])
    wrong = [r for r in records if not r["same_losses"]]
    for record in wrong:
        print(
            f"megatron-efa: the losses of {record['arm']} differ from those of {records[0]['arm']} "
            f"by {record['loss_difference']:.1e} of their value: a path changes the mathematics",
            file=sys.stderr,
        )
    return int(bool(wrong))


def _switches() -> dict[str, tuple[str, ...]]:
    """Flags that turn each path on, of the paths that this checkout's parser knows."""
    from megatron.efa.arguments import build_parser

    known = {
        option: action for action in build_parser()._actions for option in action.option_strings
    }
    found = {}
    for path, (flag, value) in PATHS.items():
        action = known.get(flag)
        if action is not None and (words := _on(flag, action, value)):
            found[path] = words
    return found


def _on(flag: str, action: argparse.Action, value: str | None) -> tuple[str, ...] | None:
    """The words that turn a switch on: the flag alone, or its first choice that does not mean off.

    None if `value` is not among its choices.
    """
    if action.nargs == 0:
        return (flag,)
    choices = [str(choice) for choice in action.choices or ()]
    if value is None:
        value = next((choice for choice in choices if choice not in _OFF), None)
    return None if value not in choices else (flag, value)


def parse_arms(text: str, switches: dict[str, tuple[str, ...]]) -> list[Arm]:
    """Arms that `--arms` names, in order. Raises EfaError for a path that is not there."""
    names: list[str] = []
    for word in text.split(","):
        names += list(switches) if word == "each" else [word]
    arms, known = [], switches | ASIDE
    for name in names:
        paths = {"off": [], "all": list(switches)}.get(name, name.split("+"))
        for path in paths:
            if path not in known:
                raise EfaError(
                    f"--arms {text}: '{path}' is no path of this checkout: there are off, each, "
                    f"all{''.join(f', {each}' for each in known)}"
                )
        flags = tuple(word for path in paths for word in known[path])
        if all(arm.flags != flags for arm in arms):  # with one path, `all` is that path
            arms.append(Arm(name, flags))
    return arms


def _flags(args: argparse.Namespace, extra: Sequence[str]) -> list[str]:
    """Megatron's flags that all arms share; of two that say the same thing the last counts."""
    world = args.nodes * args.ranks_per_node
    backend = "nccl" if args.gpu else "gloo"
    own_data = any(word.startswith(("--data-path", "--train-data-path")) for word in extra)
    return [
        *MODEL,
        *(() if own_data else MADE_UP_DATA),
        *("--expert-model-parallel-size", str(world), "--moe-token-dispatcher-type", "alltoall"),
        *("--global-batch-size", str(2 * world), "--distributed-backend", backend),
        *("--transformer-impl", "local", "--no-gradient-accumulation-fusion"),
        *("--no-masked-softmax-fusion", "--no-rope-fusion", "--no-persist-layer-norm"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--train-iters", str(args.warm_up + args.steps)),
        *extra,
    ]


def _take_turns(
    args: argparse.Namespace, arms: Sequence[Arm], flags: list[str], out: report.Folder
) -> list[list[Any]]:
    """What the ranks saw in each turn: [arm][round] -> list of `Steps`, one a rank."""
    from megatron.efa.bench.step_rank import train
    from megatron.efa.emulate import placement
    from megatron.efa.emulate.cluster import EmulatedCluster
    from megatron.efa.emulate.forked import run_forked
    from megatron.efa.emulate.network import IsolationRefused
    from megatron.efa.emulate.rate import parse_rate

    gpus = placement.visible_gpus() if args.gpu else None
    record = args.record_routing is not None

    def on(cluster: EmulatedCluster) -> list[list[Any]]:
        seen: list[list[Any]] = [[] for _ in arms]
        with cluster:
            for round_ in range(args.rounds):
                for index in [(round_ + i) % len(arms) for i in range(len(arms))]:
                    arm = arms[index]
                    print(f"round {round_ + 1} of {args.rounds}: {arm.name}", flush=True)
                    words = [*flags, *arm.flags]
                    seen[index].append(
                        run_forked(
                            cluster,
                            args.ranks_per_node,
                            lambda words=words: train(words, cluster.isolated, record),
                            out.path / f"logs-{arm.name}-{round_}",
                            gpus=gpus,
                            timeout_s=args.timeout,
                        )
                    )
        return seen

    try:
        return on(EmulatedCluster(args.nodes, parse_rate(args.rate)))
    except IsolationRefused as refusal:
        print(f"megatron-efa: {refusal}: links are neither shaped nor counted", file=sys.stderr)
        return on(EmulatedCluster(args.nodes, isolated=False))
