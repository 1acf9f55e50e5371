"""The quickstart from end to end: data, four ranks on two nodes, checkpoint, summary, and on."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.efa.quickstart import figures

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

ROOT = Path(__file__).resolve().parents[2]


def run(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figure(said, label):
    return float(re.search(rf"^{label} +([\d.]+)", said, re.M)[1])


def test_it_learns_sums_up_and_can_be_trained_on(tmp_path):
    words = ["train.train_iters=12", "train.eval_interval=6"]
    tool = [sys.executable, "tools/quickstart.py", "--runs", str(tmp_path)]
    said = run([*tool, *words, "train.log_interval=2"])

    folder = tmp_path / "quickstart-1"
    learned = figures.learning(folder / "tensorboard")
    assert learned.steps == 12
    assert [step for step, _ in learned.validation] == [6, 12]
    assert learned.validation[1][1] < learned.validation[0][1] < learned.first
    assert figure(said, "validation loss") == pytest.approx(learned.validation[1][1], abs=1e-3)
    assert 5 < figure(said, "unigram entropy") < 7
    assert figure(said, "speed") > 0
    sent = figures.traffic(folder / "traffic.json").sent_bytes
    assert figure(said, "between nodes") == pytest.approx(sent / 12e6, abs=0.01)
    # Half of what a rank dispatches goes to the other node: 2 MoE layers, top-2, fp32, hidden 128,
    # there and back, forward and backward, of 512 tokens a rank; 4 ranks.
    assert sent / 12 > 4 * 512 * 2 * 2 * 128 * 4 * 4 / 2

    kept = json.loads((folder / "summary.json").read_text())
    assert kept["learning"]["validation"] == [list(point) for point in learned.validation]
    assert kept["traffic"]["sent_bytes"] == sent
    assert kept["versions"]["torch"]
    assert kept["machine"].endswith("CPU")

    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "12"
    resume = said.splitlines()[said.splitlines().index("To train on from the checkpoint:") + 1]
    run(shlex.split(resume))
    resumed = figures.learning(folder / "tensorboard")
    assert resumed.steps == 24
    losses = dict(figures.curves(folder / "tensorboard", "lm loss")["lm loss"])
    assert losses[13] < losses[1] - 0.5  # it went on, not anew
    assert resumed.validation[-1][1] < learned.validation[-1][1]
