"""`megatron-efa emulate` refuses what it cannot run before it starts anything, and says what it
can.
"""

import argparse
import contextlib
import io
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.efa import cli as command
from megatron.efa.emulate import cli, job, report
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.network import LinkCounters
from megatron.efa.emulate.output import LogFollower, tail
from megatron.efa.errors import EfaError

ROOT = Path(__file__).resolve().parents[2]


def parsed(*words):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


def test_options_of_the_script_are_the_scripts():
    args = parsed("--nodes", "3", "--", "train.py", "--nodes", "9", "x=1", "--", "y")
    assert args.nodes == 3
    assert args.command[-6:] == ["train.py", "--nodes", "9", "x=1", "--", "y"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--", "no_such_script.py"], "no_such_script.py"),
        (["--"], "nothing to run"),
        ([], "nothing to run"),
        (["--", "-m"], "-m needs"),
        (["--nodes", "0", "--", "-m", "x"], "0 nodes"),
        (["--nodes", "251", "--", "-m", "x"], "251 nodes"),
        (["--ranks-per-node", "0", "--", "-m", "x"], "--ranks-per-node 0"),
        (["--rate", "fast", "--", "-m", "x"], "'fast' is no link rate"),
        (["--show", "4", "--", "-m", "x"], "'4' is no rank of 0 to 3"),
        (["--show", "first", "--", "-m", "x"], "'first' is no rank"),
        (["--name", "No", "--", "-m", "x"], "'No' cannot name"),
        (["--json", "/no/such/dir/x.json", "--", "-m", "x"], "no directory /no/such/dir"),
        (["--json", "/tmp", "--", "-m", "x"], "/tmp is a directory"),
        (["--timeout=-1", "--", "-m", "x"], "--timeout -1 is no time"),
        (["--timeout", "nan", "--", "-m", "x"], "--timeout nan is no time"),
        (["--log-dir", "/dev/shm/x", "--", "-m", "x"], "/dev/shm"),
        (["--log-dir", "/dev/null/x", "--", "-m", "x"], "/dev/null/x cannot be made"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_code_two(
    words, complaint, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert command.main(["emulate", *words]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_first_and_the_last_rank_are_shown_once_each():
    assert cli.shown_ranks("0,last", 4) == [0, 3]
    assert cli.shown_ranks("0,last", 1) == [0]
    assert cli.shown_ranks("all", 3) == [0, 1, 2]
    assert cli.shown_ranks("none", 3) == []


def test_torchrun_is_the_real_one_with_a_static_rendezvous():
    words = job.torchrun_command(4, 2, 8, "198.18.0.1", 29500, ["python", "train.py"])
    assert words[1:3] == ["-m", "torch.distributed.run"]
    options = dict(zip(words[3:-3:2], words[4:-3:2], strict=True))
    assert options == {
        "--nnodes": "4",
        "--nproc-per-node": "8",
        "--node-rank": "2",
        "--master-addr": "198.18.0.1",
        "--master-port": "29500",
        "--max-restarts": "0",
    }
    assert words[-3:] == ["--no-python", "python", "train.py"]


def test_a_line_that_two_logs_share_is_shown_once_and_partial_lines_wait(tmp_path):
    first, last, out = tmp_path / "rank0.log", tmp_path / "rank3.log", io.StringIO()
    follower = LogFollower({first: "", last: ""}, out)
    follower.poll()
    last.write_bytes(b"warning\nwarning\nloss 1\nlos")
    follower.poll()
    first.write_bytes(b"warning\nhello\n")
    follower.poll()
    assert out.getvalue().splitlines() == ["warning", "warning", "loss 1", "hello"]
    with last.open("ab") as log:
        log.write(b"s 2")
    follower.poll()
    assert "loss 2" not in out.getvalue()
    follower.poll(final=True)
    assert out.getvalue().endswith("loss 2\n")


def test_the_tail_of_a_log_is_its_last_lines(tmp_path):
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("\n".join(str(line) for line in range(100)))
    assert tail(log, 3) == "97\n98\n99"


@pytest.mark.parametrize(
    ("rank", "code", "expected"),
    [
        (3, 1, "rank 3 (node1, local rank 1) ended first, with exit code 1"),
        (3, -9, "rank 3 (node1, local rank 1) ended first, with signal SIGKILL"),
        (3, -40, "rank 3 (node1, local rank 1) ended first, with signal 40"),
        (None, 1, "torchrun on node1 ended first, with exit code 1"),
    ],
)
def test_a_failure_names_node_rank_and_cause(rank, code, expected):
    failure = job.Failure(1, rank, None if rank is None else 1, code, Path("runs/x/rank3.log"))
    assert str(failure) == f"{expected}: see runs/x/rank3.log"


def test_traffic_is_reported_alike_to_people_and_programs(tmp_path):
    cluster = EmulatedCluster(2, name="demo", isolated=False)
    with cluster:
        links = [
            LinkCounters(3_000_000, 1_000_000, 30, 10),
            LinkCounters(1_000_000, 3_000_000, 10, 30),
        ]
        outcome = job.Outcome(2.0, 0, None, links)
        rows = report.table(cluster, outcome).splitlines()[-2:]
        assert rows[0].split() == ["node0", "3.00", "1.50", "1.00", "0.50"]
        content = report.as_json(cluster, 2, outcome)
    report.write_json(tmp_path / "x.json", content)
    read = json.loads((tmp_path / "x.json").read_text())
    assert [link["sent_bytes"] for link in read["links"]] == [3_000_000, 1_000_000]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_plain_local_nodes_run_commands_and_say_that_they_have_no_links(tmp_path):
    with EmulatedCluster(2, isolated=False) as cluster:
        done = cluster.run(1, ["sh", "-c", "pwd; exit 3"], cwd=tmp_path)
        assert (done.returncode, done.stdout.strip()) == (3, str(tmp_path))
        for action in (cluster.counters, lambda: cluster.set_rate(0, None)):
            with pytest.raises(EfaError, match="plain local processes"):
                action()
    with pytest.raises(EfaError, match="not running"):
        cluster.run(0, ["true"])


def test_a_summary_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(EfaError, match="x cannot be written: Is a directory"):
        report.write_json(tmp_path / "x", {})
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_terminal_stops_the_job_unless_it_was_started_with_nohup(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    received = []
    try:
        with contextlib.suppress(cli._Stopped), cli._stoppable(received):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received == ([] if ignored else [signal.SIGHUP])


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_shell_closed_are_taken_by_no_other_file(closed):
    script = (
        "import os; from megatron.efa import cli; cli._open_closed_streams(); r, w = os.pipe(); "
        "print('x', flush=True); os._exit(0 if min(r, w) > 2 else 1)"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} {closed}"
    assert subprocess.run(command, shell=True, check=False, cwd=ROOT).returncode == 0
