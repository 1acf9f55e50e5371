"""`megatron-efa launch --config FILE --target slurm ...`: render a job, show it, and start it."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from megatron.efa.config.nearest import hint
from megatron.efa.config.words import split
from megatron.efa.errors import EfaError
from megatron.efa.launch import emulated, job, kubernetes, record, slurm, torchrun
from megatron.efa.launch.job import KUBERNETES, Job

TARGETS = ("slurm", "kubernetes", "hyperpod", "torchrun", "emulated")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    option = parser.add_argument
    option("--config", metavar="FILE", help="YAML file of the job, with a launch group")
    option("--target", metavar="TARGET", required=True, help=", ".join(TARGETS))
    option("--dry-run", action="store_true", help="print all that would be written; write nothing")
    option("--submit", action="store_true", help="start the job as well")
    option("--again", action="store_true", help="render into the folder of an earlier launch")
    option("--preflight", action="store_true", help="run megatron-efa doctor on each node first")
    option("--no-check", action="store_true", help="do not ask Megatron's parser about the keys")
    option("words", nargs="*", metavar="GROUP.KEY=VALUE", help="overrides, also launch.KEY=VALUE")


def run(args: argparse.Namespace) -> int:
    """Render, and print or write or start; returns 0 or what the job's start came to."""
    if args.target not in TARGETS:
        raise EfaError(
            f"--target {args.target}: there is no such target{hint(args.target, TARGETS)}; give "
            f"one of {', '.join(TARGETS)}"
        )
    if args.submit and (args.dry_run or args.target == "torchrun"):
        what = "--dry-run starts nothing" if args.dry_run else "torchrun lines are for a scheduler"
        raise EfaError(f"--submit: {what}: leave --submit out")
    words = split(args.words)
    if words.flags:
        raise EfaError(
            f"'{words.flags[0]}' is no override: write GROUP.KEY=VALUE, as for pretrain_gpt.py"
        )
    made = job.build(args.config, words.overrides, args.target, args.preflight)
    if not args.no_check:
        _check_keys(made)
    texts = render(made)
    for verdict in made.verdicts:
        print(f"{verdict.level}: in this shell, {verdict} [{verdict.source}]", file=sys.stderr)
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    if args.dry_run:
        for name, text in texts.items():
            print(f"==> {made.run / name}\n{text}")
        return 0
    record.write(made.run, texts, args.again)
    print(f"{made.run}: {made.nodes} nodes of {made.ranks} ranks, for {made.target}")
    return _submit(made) if args.submit else _tell(made)


def render(made: Job) -> dict[str, str]:
    """Name -> text of all files of the run. Raises EfaError."""
    if made.target in KUBERNETES:
        texts = record.files(made, {})
        return texts | kubernetes.render(made, texts)
    room = {"slurm": slurm, "torchrun": torchrun, "emulated": emulated}[made.target]
    return record.files(made, room.render(made))


def _check_keys(made: Job) -> None:
    """Let Megatron's own parser judge the keys, where Megatron is at hand. Raises EfaError."""
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("megatron.core") is None
    ):
        made.notes.append("keys were not checked: there is no PyTorch or no megatron.core here")
        return
    from megatron.efa import cpu, entry
    from megatron.efa.arguments import NOT_IN_YAML, build_parser
    from megatron.efa.config.flags import Flags

    with entry.warnings_after():
        if made.values.get("distributed_backend") == "gloo":
            cpu.enable()
        flags = Flags(build_parser(), hidden=NOT_IN_YAML)
        for setting in made.settings:
            flags.of(setting)


def _start(made: Job) -> list[str]:
    file = {"slurm": "job.sbatch", "emulated": "job.sh", "torchrun": "torchrun.sh"}
    if made.target in KUBERNETES:
        return ["kubectl", "apply", "-f", str(made.run / "job.yaml")]
    path = str(made.run / file[made.target])
    return {"slurm": ["sbatch", path], "torchrun": ["bash", path, "NODE_RANK", "HEAD"]}.get(
        made.target, ["bash", path]
    )


def _tell(made: Job) -> int:
    print(f"start it with: {' '.join(_start(made))}")
    print(f"then see: megatron-efa status {made.run}")
    return 0


def _submit(made: Job) -> int:
    command = _start(made)
    try:
        if made.target == "emulated":
            return subprocess.run(command).returncode
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise EfaError(
            f"there is no {command[0]} here: on a machine that has it, {' '.join(command)}"
        ) from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise EfaError(f"{' '.join(command)} failed: {why}")
    print(done.stdout, end="")
    (Path(made.run) / "submitted").write_text(done.stdout)
    return 0
