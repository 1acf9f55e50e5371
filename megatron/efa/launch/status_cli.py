"""`megatron-efa status RUN`: where a run is; reads its folder, so it works after the fact too."""

import argparse
import json
from pathlib import Path

from megatron.efa.launch.progress import Progress, read

RUNS = Path("runs/launch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="folder of the run, or its name in runs/launch")
    parser.add_argument("--json", action="store_true", help="print JSON")


def folder(name: str) -> Path:
    """The folder that the user means."""
    return RUNS / name if not Path(name).exists() and (RUNS / name).exists() else Path(name)


def run(args: argparse.Namespace) -> int:
    """Print; returns 0. Raises EfaError."""
    progress = read(folder(args.run))
    print(json.dumps(as_json(progress), indent=1) if args.json else as_text(progress))
    return 0


def as_json(progress: Progress) -> dict:
    """What `--json` prints; loss and step of the last line, tokens a second of the whole job."""
    last = progress.steps[-1] if progress.steps else None
    return {
        "name": progress.launched["name"],
        "target": progress.launched["target"],
        "state": progress.state,
        "exit_code": progress.code,
        "step": last.step if last else None,
        "steps": last.steps if last else progress.launched.get("train_iters"),
        "loss": last.loss if last else None,
        "tokens_per_second": progress.tokens_per_s,
        "last_checkpoint": progress.checkpoint,
        "restarts": max(progress.attempts - 1, 0),
        "failures": progress.failures,
    }


def as_text(progress: Progress) -> str:
    """A line a fact."""
    told = as_json(progress)
    size = progress.launched["nodes"] * progress.launched["ranks_per_node"]
    speed = told["tokens_per_second"]
    rows = {
        "run": f"{told['name']}, {size} ranks on {progress.launched['nodes']} nodes, {told['target']}",
        "state": told["state"] + (f" (exit code {told['exit_code']})" if told["exit_code"] else ""),
        "step": f"{told['step']} of {told['steps']}" if told["step"] else "none yet",
        "loss": "none yet" if told["loss"] is None else f"{told['loss']:.4f}",
        "speed": f"{speed:,.0f} tokens/s, {speed / size:,.0f} a rank" if speed else "not known yet",
        "checkpoint": "none yet"
        if told["last_checkpoint"] is None
        else f"step {told['last_checkpoint']}",
        "restarts": str(told["restarts"]),
    }
    lines = [f"{name:12}{value}" for name, value in rows.items()]
    return "\n".join([*lines, *(f"{'failed':12}{text}" for text in progress.failures)])
