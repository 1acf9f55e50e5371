"""Benchmarks run end to end on emulated nodes, and what they write is what the links counted."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

ROOT = Path(__file__).resolve().parents[2]


def bench(words, out):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron.efa", "bench", *shlex.split(words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    what = words.split()[0]
    content = json.loads((out / f"{what}.json").read_text())
    assert (out / f"{what}.png").exists() == (importlib.util.find_spec("matplotlib") is not None)
    return content["records"], done.stdout


def test_expert_counts_what_crossed_between_nodes(tmp_path):
    records, shown = bench(
        "expert --shapes 2x2 --rounds 2 --tokens 64 --hidden 512 --rate 1gbit --chunks 1,2 "
        f"--out {tmp_path}",
        tmp_path,
    )
    upstream, *ours = records
    assert upstream["dispatcher"] == "alltoall"
    assert [r["dispatcher"] for r in ours] == ["hierarchical"] * 2
    assert [r["chunks"] for r in ours] == [1, 2]
    assert upstream["byte_ratio"] == pytest.approx(4, rel=0.1)
    for record in records:
        assert record["inter_node_bytes"] >= record["bound_bytes"] > 0
        assert record["ms"] > record["ms_forward"] > 0
        assert 0 < record["exposed_ms"] <= record["ms"]
        assert f"{record['ms']:.0f}" in shown
    # Upstream sends a copy an expert; one message a peer, for tokens, probabilities, and back.
    assert upstream["bytes_over_bound"] == pytest.approx(upstream["byte_ratio"], rel=0.06)
    assert all(r["inter_node_bytes"] < 0.4 * upstream["inter_node_bytes"] for r in ours)
    assert all(r["messages"] < upstream["messages"] for r in ours if r["chunks"] == 1)


def test_a_dispatcher_that_is_wrong_is_not_measured(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests/emulated/disagree.py", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert told["nothing"] == "measured"
    for mutation in ("rows", "probs"):
        assert f"outputs of {mutation} differ from those of alltoall" in told[mutation]
    assert "probability gradients of gradient differ" in told["gradient"]


def test_step_trains_with_paths_off_and_on(tmp_path):
    model = (
        "--num-layers 1 --hidden-size 128 --num-experts 8 --moe-router-topk 4 --seq-length 64 "
        "--max-position-embeddings 64 --global-batch-size 4"
    )
    records, shown = bench(
        "step --nodes 2 --ranks-per-node 2 --rate 1gbit --rounds 1 --steps 2 --warm-up 1 "
        f"--arms off,expert --out {tmp_path} --record-routing {tmp_path}/routing.pt -- {model}",
        tmp_path,
    )
    off, expert = records
    assert (off["arm"], expert["arm"]) == ("off", "expert")
    assert off["speedup_vs_upstream"] == 1
    assert len(off["losses"]) == 3
    assert expert["same_losses"]
    assert expert["loss_difference"] < 1e-5
    assert 0 < expert["inter_node_bytes"] < off["inter_node_bytes"]
    assert "expert" in shown
    torch = pytest.importorskip("torch")
    record = torch.load(tmp_path / "routing.pt", weights_only=True)
    assert record["experts"] == 8
    assert record["chosen"].shape == (4 * 64, 4)


def test_duplicates_between_stages_cross_once(tmp_path):
    """Two stages of two tensor-parallel ranks that hold the same activations, a stage a node."""
    model = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --moe-layer-freq [0,0] "
        "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --hidden-size 256 "
        "--micro-batch-size 4 --global-batch-size 8"
    )
    (off, pipeline), _ = bench(
        "step --nodes 2 --ranks-per-node 2 --rate 1gbit --rounds 1 --steps 2 --warm-up 1 "
        f"--arms off,pipeline --out {tmp_path} -- {model}",
        tmp_path,
    )
    assert pipeline["loss_difference"] == 0
    assert pipeline["inter_node_bytes"] == pytest.approx(off["inter_node_bytes"] / 2, rel=0.05)


def test_collectives_cross_between_nodes_no_more_than_they_must(tmp_path):
    names = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
    records, shown = bench(
        f"collectives --shapes 2x2 --sizes 1m --rounds 1 --rate 1gbit --collectives "
        f"{','.join(names)} --out {tmp_path}",
        tmp_path,
    )
    assert [record["collective"] for record in records] == names
    for record in records:
        assert record["flat_inter_node_bytes"] >= record["bound_bytes"] > 0
        assert 1 <= record["two_level_over_bound"] < 1.06
        assert record["two_level_ms"] > 0
        assert record["collective"] in shown
    by_name = {record["collective"]: record for record in records}
    assert (
        by_name["all_reduce"]["flat_inter_node_bytes"] > 1.4 * by_name["all_reduce"]["bound_bytes"]
    )
