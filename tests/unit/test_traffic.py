"""The traffic report without links: times, calls within calls, files and what refuses them."""

import itertools
import json
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GlooRanks
from hypothesis import given
from hypothesis import strategies as st

from megatron.efa import cpu
from megatron.efa.cli import main
from megatron.efa.cluster import current
from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.errors import EfaError
from megatron.efa.traffic import report, settings, trace, watch
from megatron.efa.traffic.record import Recording, Step, Timed
from megatron.efa.traffic.routes import CALLS, Sent
from megatron.efa.traffic.times import Row, length, rows_of, shared, union

POINTS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(POINTS, POINTS).map(lambda ends: (min(ends), max(ends))), max_size=8)


def cells(intervals):
    return {cell for start, end in intervals for cell in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_times_are_those_of_the_points_that_intervals_cover(a, b):
    apart = union(a)
    assert cells(apart) == cells(a)
    assert length(apart) == len(cells(a))
    assert all(first[1] < second[0] for first, second in itertools.pairwise(apart))
    assert cells(shared(apart, union(b))) == cells(a) & cells(b)


TRANSFERS = st.builds(
    lambda axis, ends, near, far: Timed(
        "send", axis, ends[0], ends[1], Sent(near, near > 0, far, far > 0), far > 0
    ),
    st.sampled_from(("ep", "dp")),
    st.tuples(POINTS, POINTS).map(sorted),
    st.integers(0, 5),
    st.integers(0, 5),
)
WAITS = st.builds(
    lambda axis, ends: Timed("wait", axis, *ends),
    st.sampled_from(("ep", "dp")),
    st.tuples(POINTS, POINTS).map(sorted),
)


@given(st.lists(TRANSFERS, max_size=6), st.lists(WAITS, max_size=6))
def test_rows_hold_every_byte_and_every_second_waited_once(transfers, waits):
    rows = rows_of(Step(1, 0.0, 40.0, transfers, waits))
    assert sum(row.bytes for row in rows.values()) == sum(
        each.sent.node_bytes + each.sent.fabric_bytes for each in transfers
    )
    for axis in ("ep", "dp"):
        waited = length(union((each.start, each.end) for each in waits if each.axis == axis))
        of_axis = [row for key, row in rows.items() if key[0] == axis]
        assert sum(row.exposed for row in of_axis) == pytest.approx(waited)
        assert all(row.seconds <= 40 for row in of_axis)


def test_a_transfer_whose_end_nobody_saw_counts_bytes_and_no_time():
    step = Step(1, 0.0, 9.0, [Timed("isend", "pp", 1.0, None, Sent(0, 0, 8, 1), True)], [])
    assert rows_of(step) == {("pp", "fabric"): Row(8, 1, 0, 0.0, 0.0)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = GlooRanks(2, tmp_path_factory.mktemp("store"))
    yield made
    made.close()


def calls_within_calls(rank):
    """Operations that are told of calls that use others, on CPUs as Megatron runs there."""
    cpu.enable()
    current.use(Cluster((Node("a", 1), Node("b", 1))))
    installed = watch.install()
    alone = dist.new_group([rank], use_local_synchronization=True)
    told = {}
    one, rows = torch.ones(4), [torch.ones(2), torch.ones(3)]
    calls = {
        "alias": lambda: dist.all_gather_into_tensor(torch.empty(8), one),
        "unequal": lambda: dist.all_gather([torch.empty(2), torch.empty(3)], rows[rank]),
        "object": lambda: dist.all_gather_object([None, None], "a"),
        "alone": lambda: dist.all_reduce(one, group=alone),
        "async": lambda: dist.all_reduce(one, async_op=True).wait(),
        "not waited for": lambda: dist.all_reduce(one, async_op=True),
    }
    kept = []
    try:
        for name, call in calls.items():
            watch.recording = recording = Recording()
            kept.append(call())
            watch.recording = None
            step = recording.finish(1)
            told[name] = ([each.op for each in step.transfers], len(step.waits))
        before = watch.recording
        kept[-1].wait()  # after its step
        watch.recording = Recording()
        with pytest.raises((RuntimeError, ValueError)):
            dist.all_gather_into_tensor(torch.empty(7), one)
        dist.barrier()
        after = len(watch.recording.transfers)
    finally:
        watch.recording = None
        installed.undo()
    return told, before, after


def test_of_calls_within_calls_the_one_that_moves_bytes_is_told(ranks):
    for told, before, after in ranks(calls_within_calls):
        assert [len(operations) for operations, _ in told.values()] == [1, 1, 2, 0, 1, 1]
        assert told["unequal"][0] == ["all_to_all_single"]
        assert set(told["object"][0]) <= set(CALLS)
        assert [waits for _, waits in told.values()] == [1, 1, 2, 0, 1, 0]
        assert before is None
        assert after == 1  # a call that fails is none


def record(step=1, **changes):
    rows = [("ep", "fabric", {0: Row(8e6, 2, 8e6, 0.1, 0.05), 1: Row(8e6, 2, 8e6, 0.2, 0.15)})]
    ranks = [
        ([(axis, tier, by_rank[rank]) for axis, tier, by_rank in rows], 0.5, 0.1) for rank in (0, 1)
    ]
    return report.record_of(step, ranks) | changes


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


def test_ranks_are_told_together(two_ranks):
    (row,) = record()["rows"]
    assert (row["bytes"], row["messages"], row["ranks"]) == (16e6, 4, 2)
    assert (row["exposed"], row["exposed_max"], row["exposed_rank"]) == (0.1, 0.15, 1)
    assert row["gbps"] == pytest.approx((0.08 + 0.04) / 2)
    assert record()["sent_by_node"] == [8e6, 8e6]


@pytest.fixture
def written(two_ranks, tmp_path):
    for step in (1, 2, 3, 2):  # resumed from before step 2
        report.append(tmp_path / "run" / report.FILE, record(step, seconds=0.1 * step))
    return tmp_path / "run"


def test_two_runs_are_compared_and_drawn(written, capsys, tmp_path):
    picture = tmp_path / "out" / "traffic.png"
    argv = ["traffic", str(written), str(written / report.FILE), "--png", str(picture)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "median of 3 steps" in shown
    assert "step 1x" in shown
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main(["traffic", str(written), "--json", "--after", "2"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["steps"], run["seconds"]) == (1, pytest.approx(0.3))


def test_a_last_line_cut_off_is_left_out_and_another_is_refused(written, capsys):
    path = written / report.FILE
    whole = path.read_text()
    path.write_text(whole + whole[:30])
    assert main(["traffic", str(path)]) == 0
    path.write_text(whole[:30] + "\n" + whole)
    assert main(["traffic", str(path)]) == 2
    assert "line 1 is not one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        (None, [], "cannot be read"),
        ("", [], "has no step in it"),
        ("[1]\n", [], "line 1"),
        ('{"step": 1}\n', [], "line 1"),
        ("\xff\n", [], "line 1"),
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path, capsys, content, words, says):
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content, encoding="latin-1" if content == "\xff\n" else "utf-8")
    assert main(["traffic", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert says in error or "cannot be read" in error


def test_steps_after_the_last_are_refused(written, capsys):
    assert main(["traffic", str(written), "--after", "3"]) == 2
    assert "its last step is 3" in capsys.readouterr().err


EVENTS = st.lists(
    st.tuples(st.sampled_from(("ep", "dp")), st.sampled_from(("send", "wait")), POINTS, POINTS),
    max_size=12,
)


@given(EVENTS)
def test_slices_of_a_trace_never_overlap_in_their_row(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("trace")
    content = [
        {"name": name, "axis": axis, "start": start, "seconds": took, "node_bytes": 0,
         "fabric_bytes": 1}
        for axis, name, start, took in events
    ]  # fmt: skip
    rank = {"rank": 3, "node": "a", "step": 1, "events": content}
    (folder / "rank00003.json").write_text(json.dumps(rank))
    drawn = [event for event in trace.join(folder)["traceEvents"] if event["ph"] == "X"]
    assert len(drawn) == len(events)
    rows = {}
    for event in sorted(drawn, key=lambda event: event["ts"]):
        assert event["ts"] >= rows.get(event["tid"], 0) - 1e-6
        rows[event["tid"]] = event["ts"] + event["dur"]


def asked(interval=0, folder=None, step=None):
    return Namespace(
        world_size=current.current().world_size,
        efa_traffic_interval=interval,
        efa_traffic_dir=folder,
        efa_traffic_trace=step,
    )


def test_a_cluster_of_another_size_is_refused():
    args = asked(1)
    args.world_size += 1
    with pytest.raises(EfaError, match="ranks and this job has"):
        settings.configure(args)


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        (asked(-1), "--efa-traffic-interval -1"),
        (asked(1, step=3), "needs a step of 1 or more, and --efa-traffic-dir"),
        (asked(1, "x", 0), "--efa-traffic-trace 0"),
        (asked(0, "x"), "has nothing to hold"),
    ],
)
def test_what_cannot_be_asked_is_refused(given_, says):
    with pytest.raises(EfaError, match=says):
        settings.configure(given_)


def test_nothing_is_watched_unless_asked_for():
    settings.configure(asked())
    before = dist.all_reduce
    settings.begin(0)
    settings.end(1)
    assert dist.all_reduce is before
    assert watch.recording is None
