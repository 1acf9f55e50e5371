"""Statistics of rounds, and the files that a benchmark leaves."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.efa.bench import statistics
from megatron.efa.errors import EfaError

values = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=20)


@given(values)
def test_a_quarter_of_the_rounds_at_most_lies_beyond_either_quartile(rounds):
    made = statistics.summary(rounds)
    assert made.rounds == len(rounds)
    assert made.low <= made.median <= made.high
    assert 4 * sum(value < made.low for value in rounds) <= len(rounds) + 3
    assert 4 * sum(value > made.high for value in rounds) <= len(rounds) + 3
    assert 2 * sum(value <= made.median for value in rounds) >= len(rounds)
    assert 2 * sum(value >= made.median for value in rounds) >= len(rounds)


@given(values, st.floats(0.5, 4))
def test_what_slows_both_of_a_round_leaves_the_ratio(rounds, factor):
    slower = [value * factor for value in rounds]
    assert statistics.ratio(slower, rounds).median == pytest.approx(factor)


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="zip"):
        statistics.ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no measurements"):
        statistics.summary([])


def test_a_folder_holds_records_and_figure(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from megatron.efa.bench import report

    out = report.Folder(tmp_path / "a" / "b", "expert")
    path = out.write_records([{"ms": 1.5}], rate="1gbit")
    content = json.loads(path.read_text())
    assert content["records"] == [{"ms": 1.5}]
    assert content["rate"] == "1gbit"
    assert content["machine"]["cpus"] >= 1
    assert sorted(p.name for p in out.path.iterdir()) == ["expert.json"]
    monkeypatch.setattr(report, "_matplotlib", lambda: None)
    assert report.Folder(tmp_path, "expert").write_figure(lambda pyplot: None) is None
    assert "megatron-efa[bench]" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(EfaError, match=r"--out .*file cannot be made"):
        report.Folder(tmp_path / "file", "expert")


def test_a_figure_that_cannot_be_drawn_leaves_no_half_of_it(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("torch")
    from megatron.efa.bench import report

    class Figure:
        def savefig(self, path, **_):
            path.write_text("half")
            raise OSError(28, "No space left on device")

    out = report.Folder(tmp_path, "step")
    with pytest.raises(EfaError, match="No space left"):
        out.write_figure(lambda pyplot: Figure())
    assert list(tmp_path.iterdir()) == []


def test_a_table_lines_up():
    from megatron.efa.bench.report import table

    assert table(["a", "bb"], [["ccc", 1], ["d", 23]]).splitlines() == [
        "a    bb",
        "ccc   1",
        "d    23",
    ]
