"""The planner's activations are those that real forward passes save; its peaks those published."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.efa.planner import activations, constants, memory, peaks, published
from megatron.efa.planner.layout import Job
from megatron.efa.planner.shape import catalogue, find

ROOT = Path(__file__).resolve().parents[2]
JOB = Job(64, 4096, 512, ep=8)

MEASURED = "DeepSeek, MTP|recompute all|norms of queries and keys$|DeepSeek, TP2|hierarchical"


def test_real_forward_passes_save_what_the_planner_says_within_5_percent(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tools/measure_activations.py", "--only", MEASURED],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    errors = re.findall(r"bytes a token, ([-+.\d]+)%", done.stdout)
    assert len(errors) == 6
    assert max(abs(float(error)) for error in errors) <= 5


def test_published_peaks_are_within_10_percent():
    found = [peak for peak in peaks.peaks(published.read(constants.PUBLISHED)) if not peak.why]
    assert {peak.run.shape.name for peak in found} >= {
        "deepseek-v3", "deepseek-v2", "qwen3-30b-a3b", "nemotron-3-nano", "nemotron-3-super",
    }  # fmt: skip
    for peak in found:
        assert abs(peak.error) <= 0.10, peak


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b", "llama-3-70b"])
@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_every_recomputed_module_saves_memory(name, implementation):
    shape, job = find(name), replace(JOB, implementation=implementation)

    def saved(*modules):
        again = replace(job, recompute=frozenset(modules))
        return activations.blocks(shape, again, bool(shape.dense_mlps), bool(shape.moe))

    kinds = ["core_attn", "layernorm"] + ["mlp"] * bool(shape.dense_mlps)
    kinds += ["mla_up_proj"] * shape.mla
    kinds += ["moe"] * bool(shape.experts) + ["shared_experts"] * bool(shape.shared_ffn)
    for kind in kinds:
        assert saved(kind) < saved(), kind
    assert saved("full") < saved(*kinds)


@pytest.mark.parametrize("name", [n for n, shape in catalogue().items() if shape.hybrid])
def test_stages_of_a_hybrid_hold_the_whole_model(name):
    shape = find(name)
    job = Job(64, 4096, 512, pp=2, ep=8)
    held = [memory.held(shape, job, stage) for stage in range(2)]
    total = sum(part.dense + part.expert * job.ep for part in held)
    copy = shape.vocab * shape.hidden * bool(shape.mtp)
    assert total - copy == pytest.approx(shape.params(mtp=True), rel=1e-3)
