"""The closing summary tells what the event files, token files and counters say."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.efa.errors import EfaError
from megatron.efa.quickstart import figures
from megatron.efa.quickstart.summary import Summary, render


def token_file(prefix, documents, dtype):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_entropy_is_that_of_a_hand_calculation(tmp_path, dtype):
    # Frequencies 1/2, 1/4, 1/4: H = 1/2 ln 2 + 1/2 ln 4 = 3/2 ln 2.
    prefix = token_file(tmp_path / "a", [[7, 7, 300], [7, 9, 300, 9, 7]], dtype)
    assert figures.unigram_entropy(prefix) == pytest.approx(1.5 * math.log(2))


def test_entropy_of_equally_frequent_tokens_is_the_logarithm_of_their_number(tmp_path):
    prefix = token_file(tmp_path / "a", [list(range(100))] * 3, np.uint16)
    assert figures.unigram_entropy(prefix) == pytest.approx(math.log(100))


def test_other_files_are_not_taken_for_tokens(tmp_path):
    with pytest.raises(EfaError, match="cannot read the tokens"):
        figures.unigram_entropy(tmp_path / "none")
    (tmp_path / "a.idx").write_bytes(b"x" * 40)
    with pytest.raises(EfaError, match="not the index of a token file"):
        figures.unigram_entropy(tmp_path / "a")


def events(folder, scalars):
    with SummaryWriter(folder) as writer:
        for name, points in scalars.items():
            for step, value in points:
                writer.add_scalar(name, value, step)
    return folder


def test_losses_are_those_of_the_event_files(tmp_path):
    losses = [(step, 7 - step / 10) for step in range(1, 31)]
    found = figures.learning(
        events(tmp_path, {"lm loss": losses, "lm loss validation": [(20, 5.5), (30, 5.25)]})
    )
    assert found.steps == 30
    assert found.first == pytest.approx(6.9)
    assert found.last == pytest.approx(sum(7 - s / 10 for s in range(21, 31)) / 10)
    assert found.validation == [(20, 5.5), (30, 5.25)]


def test_a_step_trained_again_after_a_resume_counts_once_as_trained_last(tmp_path):
    events(tmp_path, {"lm loss": [(1, 6.0), (2, 5.0), (3, 4.5)]})
    with SummaryWriter(tmp_path, filename_suffix=".later") as writer:
        writer.add_scalar("lm loss", 4.0, 3, walltime=4e9)
    assert figures.curves(tmp_path, "lm loss") == {"lm loss": [(1, 6.0), (2, 5.0), (3, 4.0)]}


def test_a_run_without_losses_is_refused(tmp_path):
    with pytest.raises(EfaError, match="no losses"):
        figures.learning(events(tmp_path, {"other": [(1, 1.0)]}))
    with pytest.raises(EfaError, match="no losses"):
        figures.learning(tmp_path / "none")


def test_time_of_a_step_is_the_median_after_the_warm_up(tmp_path):
    times = [(10, 9.0), (20, 5.0), (30, 0.25), (40, 0.5), (50, 0.25)]
    assert figures.seconds_a_step(events(tmp_path, {"iteration-time": times})) == 0.25


def report(path, links, isolated=True):
    path.write_text(json.dumps({"isolated": isolated, "links": links, "seconds": 12.5}))
    return figures.traffic(path)


def test_traffic_is_what_all_nodes_sent(tmp_path):
    links = [{"sent_bytes": 5, "received_bytes": 70}, {"sent_bytes": 70, "received_bytes": 5}]
    assert report(tmp_path / "t.json", links) == figures.Traffic(True, 75, 12.5)
    assert report(tmp_path / "t.json", None, False) == figures.Traffic(False, None, 12.5)


def test_what_is_no_report_is_refused(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    for path in (tmp_path / "t.json", tmp_path / "none"):
        with pytest.raises(EfaError, match="not the emulator's report"):
            figures.traffic(path)


def text(traffic, validation=4.0):
    learning = figures.Learning(200, 6.9, 3.5, [(200, validation)])
    return render(
        Summary(learning, 5.75, 2048, 0.25, traffic, 100, Path("runs/q-1"), "resume me", "tb")
    )


def test_the_summary_sets_the_loss_beside_the_entropy():
    said = text(figures.Traffic(True, 10**9, 90))
    for loss in ("6.900 at the first step", "4.000 nats", "5.750 nats", "1.75 below"):
        assert loss in said
    for other in ("8192 tokens/s", "5.00 MB a step", "runs/q-1/checkpoints", "resume me"):
        assert other in said
    assert "NOT below" in text(figures.Traffic(True, 10**9, 90), validation=6.0)


def test_uncounted_bytes_are_said_to_be_so():
    said = text(figures.Traffic(False, None, 90))
    assert "not counted" in said
    assert "MB" not in said
