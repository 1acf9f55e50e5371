"""The quickstart, stage by stage: data, training on an emulated cluster, what came of it."""

import argparse
import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.efa.config.compose import compose
from megatron.efa.emulate import kernel
from megatron.efa.errors import EfaError
from megatron.efa.fork import verify_at_start
from megatron.efa.quickstart import figures
from megatron.efa.quickstart.prepare import ROOT, Data, prepare, short
from megatron.efa.quickstart.summary import Summary, record, render

CONFIG = ROOT / "examples" / "quickstart.yaml"

_LOOK_S = 2.0
"""How often training is looked at for new losses."""


@dataclass(frozen=True)
class Run:
    """One training run's folder and the configuration that it trains with."""

    folder: Path
    overrides: list[str]

    @property
    def log(self) -> Path:
        return self.folder / "train.log"

    @property
    def events(self) -> Path:
        return self.folder / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def traffic(self) -> Path:
        return self.folder / "traffic.json"

    def settings(self) -> dict[str, Any]:
        """Return Megatron's arguments by name, as far as the config sets them."""
        return {setting.key: setting.value for setting in compose(str(CONFIG), self.overrides)}

    def resumed(self) -> list[str]:
        """Return the overrides that train on from the last checkpoint, as long again."""
        return [
            *(word for word in self.overrides if not word.startswith("train.train_iters=")),
            f"train.load={_word(self.checkpoints)}",
            f"train.train_iters={2 * self.settings()['train_iters']}",
            "train.override_opt_param_scheduler=true",  # for the learning rate falls until then
        ]


def new_folder(runs: Path) -> Path:
    """Make and return `RUNS/quickstart-N`, N one more than the largest there is."""
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [
            int(match[1])
            for p in runs.iterdir()
            if (match := re.fullmatch(r"quickstart-(\d+)", p.name))
        ]
        folder = runs / f"quickstart-{max(numbers, default=0) + 1}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run took the number just now
            continue
        return folder


def check_overrides(overrides: Sequence[str]) -> None:
    """Raise EfaError, before anything is made, for overrides that do not compose to a run."""
    known = {setting.key for setting in compose(str(CONFIG), overrides)}
    for key in ("train_iters", "global_batch_size", "seq_length"):
        if key not in known:
            raise EfaError(
                f"the overrides take {key} away, without which there is no run to sum up"
            )


def run_overrides(data: Data, folder: Path) -> list[str]:
    """Where this run reads and writes, as overrides of the config, which names the usual data."""
    where = {"train.save": folder / "checkpoints", "train.tensorboard_dir": folder / "tensorboard"}
    words = [f"{key}={_word(path)}" for key, path in where.items()]
    if data.folder.resolve() == ROOT / "runs" / "quickstart-data":
        return words
    return [
        f"data.train_data_path=[{_word(data.train)}]",
        f"data.valid_data_path=[{_word(data.valid)}]",
        f"data.tokenizer_model={_word(data.tokenizer)}",
        *words,
    ]


def device_overrides(args: argparse.Namespace) -> list[str]:
    """The config is for CPUs; on GPUs the same model trains over NCCL."""
    return ["cluster.distributed_backend=nccl"] if args.gpu else []


def _word(path: Path) -> str:
    """Return a path as a value in Hydra's grammar."""
    word = short(path)
    return word if re.fullmatch(r"[\w./-]+", word) else "'" + word.replace("'", "\\'") + "'"


def emulate(args: argparse.Namespace, overrides: Sequence[str], *options: str) -> list[str]:
    """Return the command that trains on the emulated cluster, to be run in the root."""
    return [
        *(short(Path(sys.executable)), "-m", "megatron.efa", "emulate", "--nodes", str(args.nodes)),
        *("--ranks-per-node", str(args.ranks_per_node), "--rate", args.rate),
        *(*(["--gpu"] if args.gpu else []), *options, "--"),
        *("pretrain_gpt.py", "--config", short(CONFIG), *overrides),
    ]


def train(command: list[str], run: Run, say: Callable[[str], None]) -> None:
    """Run the training command, telling its losses as they come; raises EfaError if it fails."""
    told = 0
    with run.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(kernel.die_with_parent, signal.SIGTERM),  # no thread runs here
        )
        try:
            while process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                told = _tell_losses(run.events, told, say, ended=process.returncode is not None)
        except BaseException:  # the emulator removes its cluster, then ends
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    if process.returncode:
        raise EfaError(
            f"training failed with exit code {process.returncode}{_reason(run.log)}: "
            f"see {short(run.log)}"
        )


def _reason(log: Path) -> str:
    """Return what the training script, or else the emulator, said was wrong."""
    lines = log.read_text(errors="replace").splitlines()
    for speaker in ("pretrain_gpt.py: ", "megatron-efa: "):
        said = [line.removeprefix(speaker) for line in lines if line.startswith(speaker)]
        if said:
            return f" ({said[-1]})"
    return ""


def _tell_losses(events: Path, told: int, say: Callable[[str], None], ended: bool) -> int:
    """Tell every tenth step's loss after step `told`, and the validation loss that follows it.

    Returns the last step that was told.
    """
    found = figures.curves(events, "lm loss", "lm loss validation")
    losses, validation = found["lm loss"], dict(found["lm loss validation"])
    # A validation is written after its step: tell the step once the next one is there.
    for step, loss in losses if ended else losses[:-1]:
        if step > told and (step % 10 == 0 or step == 1):
            held_out = f"   held out {validation[step]:.3f}" if step in validation else ""
            say(f"train: step {step:4d}   loss {loss:.3f}{held_out}")
            told = step
    return told


def run(args: argparse.Namespace) -> int:
    """Prepare, train, and print what came of it; raises EfaError naming the stage's log."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.1f} s] {text}", flush=True)

    verify_at_start()
    check_overrides(args.overrides)
    runs = args.runs.absolute()
    folder = new_folder(runs)
    data = prepare(runs / "quickstart-data", folder / "prepare.log", say)
    run = Run(folder, [*run_overrides(data, folder), *device_overrides(args), *args.overrides])
    settings = run.settings()
    logs = ("--log-dir", short(run.folder / "ranks"), "--json", short(run.traffic))
    say(
        f"train: {settings['train_iters']} steps on {args.nodes} emulated nodes of "
        f"{args.ranks_per_node} ranks, {args.rate} between them; output in {short(run.log)}"
    )
    train(emulate(args, run.overrides, *logs), run, say)
    summary = Summary(
        learning=figures.learning(run.events),
        entropy=figures.unigram_entropy(data.valid),
        tokens_a_step=settings["global_batch_size"] * settings["seq_length"],
        seconds_a_step=figures.seconds_a_step(run.events),
        traffic=figures.traffic(run.traffic),
        seconds=time.monotonic() - start,
        folder=Path(short(folder)),
        resume=shlex.join(emulate(args, run.resumed())),
        tensorboard=shlex.join(
            [short(Path(sys.executable)), "-m", "tensorboard.main", "--logdir", short(runs)]
        ),
    )
    figures_file = folder / "summary.json"
    figures_file.write_text(json.dumps(record(summary, args.gpu), indent=2) + "\n")
    print(render(summary))
    return 0
