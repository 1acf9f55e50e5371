"""A launched run: it goes on by itself after a rank is killed, and tells how it went."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.efa.launch import progress

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

ROOT = Path(__file__).resolve().parents[2]
# pretrain_gpt.py, but the last rank is killed as it prints step 5, the first time.
KILLED = f"""
import os, pathlib, runpy, signal, sys

killed = pathlib.Path(sys.argv[2]).parent / "killed"

class Output:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        self.stream.write(text)
        if " iteration        5/" in text and not killed.exists():
            self.stream.flush()
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def __getattr__(self, name):
        return getattr(self.stream, name)

if os.environ["RANK"] == "1":
    sys.stdout = Output(sys.stdout)
sys.argv[0] = {str(ROOT / "pretrain_gpt.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def tool(*words):
    command = [sys.executable, "-m", "megatron.efa", *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=540)


def losses(attempt):
    with progress.last_rank(attempt, "stdout").open() as lines:
        return {step.step: step.loss for step in progress.parse(lines)}


def test_a_run_continues_exactly_after_a_rank_was_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    launch = {"runs": tmp_path, "name": "run", "nodes": 2, "ranks_per_node": 1, "script": script}
    words = [f"launch.{key}={value}" for key, value in launch.items()]
    train = ["cluster=cpu", "parallel.expert_model_parallel_size=2", "train.train_iters=8"]
    train += ["train.save_interval=3", "train.eval_iters=0", "model=gpt_tiny"]
    train.remove("parallel.expert_model_parallel_size=2")
    options = ["--config", "examples/mock.yaml", "--target", "emulated", "--submit", "--no-check"]
    done = tool("launch", *options, *words, *train)
    run = tmp_path / "run"
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    first, second = (losses(attempt) for attempt in progress.attempts_of(run))
    assert list(first) == [1, 2, 3, 4, 5]
    assert list(second) == [4, 5, 6, 7, 8]  # from the checkpoint of step 3 on
    assert (second[4], second[5]) == (first[4], first[5])
    assert "rank-1-on-node1 failed" in done.stderr.replace("(", "").replace(")", "") or (
        "rank-1-on-node1" in done.stderr
    )

    told = json.loads(tool("status", run, "--json").stdout)
    assert told["state"] == "done"
    assert (told["step"], told["loss"]) == (8, second[8])
    assert (told["restarts"], told["last_checkpoint"]) == (1, 8)
    assert told["failures"] == [
        "attempt 1: rank 1 on node1 ended first, with signal 9",
    ]
    shown = tool("logs", run, "--lines", 0, "--attempt", 1).stdout
    assert " iteration        5/       8 |" in shown
