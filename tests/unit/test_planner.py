"""The planner's counts equal what is published; its parts sum; its search is legal."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.efa.config.compose import EXAMPLES
from megatron.efa.errors import EfaError
from megatron.efa.planner import (
    constants,
    fit,
    memory,
    page,
    published,
    report,
    search,
    time,
    write,
)
from megatron.efa.planner.from_config import shape_of
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import MACHINES, of_kind
from megatron.efa.planner.pipeline import layout, slots, stages
from megatron.efa.planner.published import Run
from megatron.efa.planner.shape import catalogue, find
from megatron.efa.planner.work import copies

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/fit_planner.py"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 671.0),
        ("kimi-k2", 1026.4),
        ("ling-1t", 999.7),
        ("qwen3-235b-a22b", 235.1),
        ("qwen3-30b-a3b", 30.53),
        ("llama-3.1-405b", 405.9),
    ],
)
def test_parameters_are_those_published(name, billions):
    assert find(name).params() / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "seq", "tflop"),
    [
        ("deepseek-v3", 4096, 0.2600),
        ("kimi-k2", 4096, 0.2045),
        ("qwen3-235b-a22b", 4096, 0.1480),
        ("llama-3-70b", 8192, 0.4492),
        ("moonlight-16b", 4096, 0.0172),
    ],
)
def test_flops_are_counted_as_megatron_counts_them(name, seq, tflop):
    assert find(name).flops_per_token(seq) / 1e12 == pytest.approx(tflop, rel=4e-3)


def test_every_spelling_in_the_published_rows_is_one_model():
    assert find("Qwen3_235B_a22B").name == find("Qwen3-235B-A22B").name == "qwen3-235b-a22b"
    assert find("Kimi-K2 1.04T (384e, no MTP)").name == "kimi-k2"
    assert find("DeepSeekV3 (w/o MTP)").name == "deepseek-v3"
    with pytest.raises(EfaError, match="not in the planner's catalogue"):
        find("a model of tomorrow")


def test_every_planned_example_is_the_model_of_the_catalogue():
    files = sorted((EXAMPLES / "trillion").glob("*.yaml"))
    assert len(files) >= 9
    for file in files:
        read, known = shape_of(file), find(file.stem)
        assert read.params(mtp=True) == known.params(mtp=True)
        assert read.flops_per_token(4096) == known.flops_per_token(4096)


def test_a_planned_example_is_what_the_planner_gives_now():
    """Else plan the examples anew: tools/plan_examples.py."""
    shape, machine = find("qwen3-30b-a3b"), of_kind("p5")
    best = search.search(shape, Job(16, 4096, 256), machine, {"dispatcher": "hierarchical"})[0]
    file = EXAMPLES / "trillion/qwen3-30b-a3b-p5.yaml"
    assert file.read_text() == write.render(shape, best.job, "p5")


def test_memory_of_deepseek_v3_equals_the_published_table():
    """arXiv 2603.07685, table 3, GiB: weights and gradients 36.4, optimizer 32.1, activations
    131.0."""
    job = Job(256, 4096, 8192, pp=4, vp=4, ep=64)
    middle = memory.usage(find("deepseek-v3"), job, 1)
    assert (middle.weights + middle.gradients) / memory.GIB == pytest.approx(36.4, rel=0.01)
    assert middle.optimizer / memory.GIB == pytest.approx(32.1, rel=0.01)
    first = memory.usage(find("deepseek-v3"), job, 0)
    assert first.activations / memory.GIB == pytest.approx(131.0, rel=0.05)


def test_all_stages_hold_the_whole_model():
    shape = find("deepseek-v3")
    job = Job(512, 4096, 4096, pp=8, vp=2, ep=32)
    held = [memory.held(shape, job, stage) for stage in range(8)]
    total = sum(part.dense + part.expert * job.ep for part in held)
    copy = shape.vocab * shape.hidden  # MTP's own table of embeddings
    assert total - copy == shape.params(mtp=True)


@given(st.sampled_from(sorted(catalogue())), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=40)
def test_a_pipeline_layout_has_every_layer_once(name, pp, vp):
    shape = find(name)
    if pp * vp > shape.layers:
        return
    counts = slots(shape, pp, vp, 4096)
    assert sum(counts) == shape.layers
    assert sum(map(sum, stages(shape, pp, vp, 4096))) == shape.layers
    words = layout(shape, pp, vp, 4096)
    assert words.startswith("E")
    assert words.endswith("L")


@given(st.sampled_from([8, 16, 32, 64, 128]), st.integers(1, 8))
@settings(deadline=None)
def test_one_copy_per_node_never_sends_more_between_nodes(ep, k):
    shape = replace(find("kimi-k2"), topk=k)
    flat = copies(shape, ep, 8, "alltoall")
    once = copies(shape, ep, 8, "hierarchical")
    assert once[1] <= flat[1] + 1e-9
    assert (once[1] == 0) == (ep <= 8)


def test_copies_are_those_of_uniform_routing():
    """Counted over random choices of 8 of 256 experts on 32 ranks of 4 nodes."""
    rng = np.random.default_rng(0)
    seen = []
    for _ in range(4000):
        nodes = set(rng.choice(256, 8, replace=False) // 64)
        seen.append(len(nodes - {0}))
    shape = replace(find("kimi-k2"), experts=256)
    assert copies(shape, 32, 8, "hierarchical")[1] == pytest.approx(np.mean(seen), rel=0.03)


def plan_of(**more):
    job = Job(256, 4096, 2048, pp=8, ep=32, **more)
    return search.evaluate(find("kimi-k2"), [job], of_kind("p6-b300"))[0]


def test_the_breakdown_sums_to_the_step_and_has_no_negative_part():
    plan = plan_of()
    assert sum(plan.parts.values()) == pytest.approx(plan.seconds)
    assert min(plan.parts.values()) >= 0


def test_more_recomputation_imbalance_or_a_slower_wire_never_helps():
    base = plan_of().seconds
    assert plan_of(recompute=frozenset({"full"})).seconds > base
    assert plan_of(imbalance=1.5).seconds > base
    slow = replace(of_kind("p6-b300"), far=of_kind("p6-b300").far / 4)
    job = Job(256, 4096, 2048, pp=8, ep=32)
    assert search.evaluate(find("kimi-k2"), [job], slow)[0].seconds > base


def test_search_gives_legal_layouts_that_fit_fastest_first():
    shape, machine = find("qwen3-235b-a22b"), of_kind("p5en")
    plans = search.search(shape, Job(64, 4096, 512), machine, {"tp": 1})
    assert plans == sorted(plans, key=lambda p: p.seconds)
    for plan in plans[:200]:
        plan.job.check()
        assert plan.job.tp == 1
        assert plan.usage.total <= machine.memory
        assert plan.job.dp * plan.job.mbs * plan.job.microbatches == plan.job.gbs


def test_search_says_what_does_not_fit():
    with pytest.raises(EfaError, match="does not fit 8 H100: the smallest layout"):
        search.search(find("kimi-k2"), Job(8, 4096, 64), of_kind("p5"))


@pytest.fixture(scope="module")
def rows():
    return report.sort_rows(published.read(constants.PUBLISHED))


def test_every_published_row_is_predicted(rows):
    assert not rows.refused
    assert len(rows.runs) == 238


def test_the_committed_constants_are_those_that_the_rows_give(rows):
    logs = fit.fit(fit.table(rows.runs))
    assert fit.constants(logs) == pytest.approx(constants.load(), rel=0.02)


def test_held_out_groups_are_predicted_within_the_promised_errors(rows):
    predicted, _ = fit.cross_validate(rows.runs)
    summary = report.summary(rows, predicted)
    assert summary["median_abs_error"] <= 0.12
    assert summary["p90_abs_error"] <= 0.30


def test_a_held_out_group_is_not_in_the_fit(rows, monkeypatch):
    """Change one group's measurements: its own predictions stay as they were."""
    few = [run for run in rows.runs if run.machine.name == "B200"]
    group = few[0].group
    twisted = [replace(r, seconds=r.seconds * 3) if r.group == group else r for r in few]
    before, _ = fit.cross_validate(few)
    after, _ = fit.cross_validate(twisted)
    mine = np.array([run.group == group for run in few])
    assert after[mine] == pytest.approx(before[mine], rel=1e-6)
    assert not np.allclose(after[~mine], before[~mine], rtol=1e-3)


def write_rows(path, *changes):
    with constants.PUBLISHED.open(newline="") as lines:
        reader = csv.DictReader(lines)
        first, names = next(reader), reader.fieldnames
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, names)
        writer.writeheader()
        for change in changes:
            writer.writerow(first | change)
    return path


def evaluate(path, *flags):
    return subprocess.run(
        [sys.executable, TOOL, "--evaluate", path, *flags], capture_output=True, text=True
    )


def test_a_file_of_unseen_rows_is_evaluated_and_says_what_it_cannot_predict(tmp_path):
    path = write_rows(
        tmp_path / "new.csv",
        {"model": "Ling-1T", "num_gpus": "512", "ep": "64", "pp": "8", "step_time_s": "30"},
        {"model": "Mixtral 8x22B", "gpu": "H200", "num_gpus": "128", "ep": "8", "pp": "4"},
        {"model": "GPT-9"},
        {"gpu": "TPU v9"},
        {"seq_len": "many"},
        {"step_time_s": "", "tokens_per_s_per_gpu": ""},
        {"tp": "3"},
    )
    done = evaluate(path, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["rows"] == 7
    assert summary["not_predicted"] == 4
    assert math.isfinite(summary["median_abs_error"])
    told = evaluate(path).stdout
    for why in ("GPT-9", "TPU v9", "seq_len='many'", "not a multiple", "no step time"):
        assert why in told


def test_a_file_without_the_columns_is_refused_in_one_line(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    done = evaluate(tmp_path / "x.csv")
    assert done.returncode == 2
    assert "no column source" in done.stderr
    assert done.stderr.count("\n") == 1


def test_arrays_and_single_runs_give_the_same_seconds(rows):
    table = fit.table(rows.runs[:5])
    together = fit.predict(table, constants.logs())
    for i, run in enumerate(rows.runs[:5]):
        one = fit.table([run])
        assert time.step(one.work, one.conditions, constants.load())[0] == pytest.approx(
            together[i]
        )


def test_parallel_runs_of_the_same_job_do_not_depend_on_the_row():
    job = Job(64, 4096, 512, ep=8)
    assert Run({}, find("qwen3-30b-a3b"), job, MACHINES["H100"], 1.0).group == (
        "qwen3-30b-a3b",
        "H100",
    )


def test_the_page_shows_every_plan_and_every_stage():
    shape, machine = find("kimi-k2"), of_kind("p6-b300")
    plans = [plan_of(), plan_of(recompute=frozenset({"full"}))]
    text = page.html(shape, machine, plans, [p.figures(shape, machine, 1e12) for p in plans])
    assert text.count("<svg") == 3
    for plan in plans:
        assert search.describe(plan.job) in text
    assert all(f"stage {stage}<" in text for stage in range(8))
    assert text.count("<title>F") == text.count("<title>B") > 0
