"""The dry run builds what the cluster would: exact counts, real groups, Megatron's own refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.efa.planner import dryrun, memory, search
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import of_kind
from megatron.efa.planner.shape import find
from megatron.efa.planner.write import render

ROOT = Path(__file__).resolve().parents[2]


def dry_run(*words):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, "-m", "megatron.efa", "dry-run", *words],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
    )


JOB = Job(256, 4096, 2048, tp=2, pp=4, vp=2, ep=64, dispatcher="alltoall")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "deepseek.yaml"
    path.write_text(render(find("deepseek-v3"), JOB, "p5en"))
    return path


@pytest.fixture(scope="module")
def built(config):
    done = dry_run("--world-size", "256", "--cluster", "p5en", "--json", "--config", config)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_model_has_the_published_number_of_parameters(built):
    assert built["total_parameters"] == find("deepseek-v3").params(mtp=True)
    assert built["total_parameters"] / 1e9 == pytest.approx(671.0 + 11.6, rel=1e-3)


def test_the_memory_model_counts_every_stage_exactly(built):
    for rank in built["ranks"]:
        held = memory.held(find("deepseek-v3"), JOB, rank["pipeline_stage"])
        assert held.expert == rank["expert_parameters"]
        assert held.dense == rank["parameters"] - rank["expert_parameters"]
        used = memory.usage(find("deepseek-v3"), JOB, rank["pipeline_stage"])
        for name, counted in (
            ("weight_bytes", used.weights),
            ("gradient_bytes", used.gradients),
            ("optimizer_bytes", used.optimizer),
        ):
            assert counted == pytest.approx(rank[name], rel=1e-6), name


def test_the_job_is_predicted_as_its_plan_is(built):
    planned = search.evaluate(find("deepseek-v3"), [JOB], of_kind("p5en"))[0]
    assert built["predicted"]["step_s"] == pytest.approx(planned.seconds, rel=1e-6)
    for name, size in vars(planned.usage).items():
        assert built["predicted"]["memory_bytes"][name] == pytest.approx(size, rel=1e-3), name


def test_every_layer_stands_on_one_stage_and_experts_are_divided(built):
    layers = [layer for rank in built["ranks"] for layer in rank["layers"]]
    assert sorted(layers) == list(range(61))
    assert {rank["experts"] for rank in built["ranks"]} == {4}
    assert [rank["mtp_layers"] for rank in built["ranks"]] == [0, 0, 0, 1]


def test_groups_hold_the_ranks_of_the_real_cluster(built):
    groups = built["ranks"][0]["groups"]
    assert groups["tp"] == [0, 1]
    assert groups["pp"] == [0, 64, 128, 192]
    assert groups["ep"] == list(range(64))
    assert len(groups["dp"]) == 32


def test_every_planned_example_is_one_that_megatrons_parser_takes():
    files = sorted((ROOT / "examples/trillion").glob("*.yaml"))
    assert len(files) >= 9
    for file in files:
        assert "--expert-model-parallel-size" in dryrun.flags_of(["--config", str(file)])


def test_an_argument_that_megatron_refuses_is_one_line(config):
    done = dry_run("--world-size", "250", "--config", config)
    assert done.returncode == 2
    assert done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("megatron-efa: ")
    assert "250" in line
    assert "Traceback" not in done.stderr
