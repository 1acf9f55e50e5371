"""The quickstart, stage by stage: data, training on an emulated cluster, what came of it."""

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.efa.config.compose import Setting, compose
from megatron.efa.errors import EfaError
from megatron.efa.fork import verify_at_start
from megatron.efa.quickstart import figures
from megatron.efa.quickstart.prepare import ROOT, Data, prepare
from megatron.efa.quickstart.summary import Summary, render

CONFIG = ROOT / "examples" / "quickstart.yaml"


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

    def settings(self) -> dict[str, Setting]:
        return {setting.key: setting for setting in compose(str(CONFIG), self.overrides)}


def new_folder(runs: Path) -> Path:
    """Make and return `RUNS/quickstart-N`, N one more than the largest there is."""
    runs.mkdir(parents=True, exist_ok=True)
    while True:
        numbers = [
            int(match[1]) for p in runs.iterdir() if (match := re.fullmatch(r"quickstart-(\d+)", p.name))
        ]
        folder = runs / f"quickstart-{max(numbers, default=0) + 1}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run took the number just now
            continue
        return folder


def run_overrides(data: Data, folder: Path) -> list[str]:
    """Where this run reads and writes, as overrides of the config."""
    return [
        f"data.train_data_path=['{_short(data.train)}']",
        f"data.valid_data_path=['{_short(data.valid)}']",
        f"data.tokenizer_model='{_short(data.tokenizer)}'",
        f"train.save='{_short(folder / 'checkpoints')}'",
        f"train.tensorboard_dir='{_short(folder / 'tensorboard')}'",
    ]


def _short(path: Path) -> Path:
    path = path.resolve()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def emulate(args: argparse.Namespace, run: Run) -> list[str]:
    """Return the command that trains on the emulated cluster."""
    return [
        *(sys.executable, "-m", "megatron.efa", "emulate"),
        *("--nodes", str(args.nodes), "--ranks-per-node", str(args.ranks_per_node)),
        *("--rate", args.rate, "--log-dir", str(run.folder / "ranks")),
        *("--json", str(run.traffic), "--"),
        *("pretrain_gpt.py", "--config", str(CONFIG.relative_to(ROOT)), *run.overrides),
    ]


def train(command: list[str], run: Run, say: Callable[[str], None]) -> None:
    """Run the training command, telling its losses as they come; raises EfaError if it fails."""
    told = 0
    with run.log.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(2)
                told = _tell_losses(run.events, told, say)
        except BaseException:  # the emulator removes its cluster, then ends
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    _tell_losses(run.events, told, say)
    if process.returncode:
        lines = run.log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("megatron-efa:")]
        reason = f" ({said[-1].removeprefix('megatron-efa: ')})" if said else ""
        raise EfaError(f"training failed with exit code {process.returncode}{reason}: see {run.log}")


def _tell_losses(events: Path, told: int, say: Callable[[str], None]) -> int:
    """Tell every tenth step's loss after step `told`, with the validation loss if there is one."""
    found = figures.curves(events, "lm loss", "lm loss validation")
    losses, validation = found["lm loss"], dict(found["lm loss validation"])
    # A validation is written after its step: tell the step once the next one is there.
    for step, loss in losses[:-1]:
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
    folder = new_folder(args.runs)
    data = prepare(args.runs / "quickstart-data", folder / "prepare.log", say)
    run = Run(folder, [*run_overrides(data, folder), *args.overrides])
    settings = run.settings()
    command = emulate(args, run)
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    world = args.nodes * args.ranks_per_node
    say(
        f"train: {settings['train_iters'].value} steps on {args.nodes} emulated nodes of "
        f"{args.ranks_per_node} ranks, {args.rate} between them; output in {run.log}"
    )
    train(command, run, say)
    summary = Summary(
        learning=figures.learning(run.events),
        entropy=figures.unigram_entropy(data.valid),
        tokens_a_step=settings["global_batch_size"].value * settings["seq_length"].value,
        seconds_a_step=figures.seconds_a_step(run.events),
        traffic=figures.traffic(run.traffic),
        world=world,
        seconds=time.monotonic() - start,
        folder=_short(folder),
        resume=resume(args, run, settings),
    )
    print(render(summary))
    return 0


def resume(args: argparse.Namespace, run: Run, settings: dict[str, Setting]) -> str:
    """Return the command that trains on from the run's last checkpoint."""
    more = Run(
        run.folder,
        [
            *run.overrides,
            f"train.load='{_short(run.checkpoints)}'",
            f"train.train_iters={2 * settings['train_iters'].value}",
            "train.override_opt_param_scheduler=true",
        ],
    )
    return shlex.join(emulate(args, more))
