"""`bench startup` makes the same groups in each way, and refuses what it cannot measure."""

import argparse
import json
import os
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from megatron.efa import groups
from megatron.efa.bench import startup, startup_rank
from megatron.efa.cluster.current import forget
from megatron.efa.emulate import job as jobs
from megatron.efa.errors import EfaError
from megatron.efa.groups import start


def arguments(*words):
    parser = argparse.ArgumentParser()
    startup.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--shapes", "2by4"], "--shapes: '2by4' is no shape"),
        (["--shapes", "0x4"], "--shapes: '0x4' is no shape"),
        (["--views", "500"], "--views: '500' is no multiple of 512"),
        (["--rounds", "0"], "--rounds 0 is not 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, sentence):
    with pytest.raises(EfaError, match=sentence):
        startup.run(arguments(*words))


def test_a_view_makes_upstreams_groups_in_each_way_and_then_the_parts():
    try:
        upstream, ours, parts = startup_rank.viewed(512, rounds=1)
    finally:
        dist.destroy_process_group()
        forget()
        groups.configure(argparse.Namespace())
        start.unexpect()
    assert upstream["groups"] == ours["groups"] < parts["groups"]
    assert all(r["seconds"] > 0 and 0 <= r["mib"] < 1024 for r in (upstream, ours, parts))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_small_cluster_is_measured(tmp_path, capsys):
    out = tmp_path / "startup.json"
    words = ["--shapes", "2x1", "--views", "", "--pp", "1", "--ep", "2", "--rounds", "1"]
    assert startup.run(arguments(*words, "--json", str(out))) == 0
    records = json.loads(out.read_text())["startup"]
    assert records[0]["way"] == "upstream"
    assert {record["ranks_per_node"] for record in records} == {1}
    assert capsys.readouterr().out.count("2x1") == len(records) == 3


def test_a_job_that_fails_is_a_sentence_after_its_log(monkeypatch, tmp_path, capsys):
    (tmp_path / "rank1.log").write_text("upstream refuses\n")
    failure = jobs.Failure(0, 1, 1, 1, tmp_path / "rank1.log")
    monkeypatch.setattr(jobs, "run_job", lambda cluster, job: jobs.Outcome(1, 1, failure, None))
    monkeypatch.setattr(startup, "EmulatedCluster", lambda *words, **more: nullcontext())
    with pytest.raises(EfaError, match="the job of 1x2 ranks failed: rank 1 "):
        startup.run(arguments("--shapes", "1x2", "--views", ""))
    assert "upstream refuses" in capsys.readouterr().err
