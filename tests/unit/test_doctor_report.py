"""What a new user sees: the cause, first, on one screen. What a script gets: a code and JSON."""

import json
import subprocess
import sys
import threading
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_host import CONTEXT, PLUGIN, bare, healthy

from megatron.efa import cli
from megatron.efa.doctor import context, job, registry, report
from megatron.efa.doctor.registry import Check, Finding, fail, findings, ok, warn
from megatron.efa.emulate.job import free_port
from megatron.efa.errors import EfaError

ROOT = Path(__file__).resolve().parents[2]
SCREEN = 45
"""Lines of a terminal that is not small."""


class Denied:
    def __getattr__(self, operation):
        raise EfaError("EC2 cannot be asked here")


def options(*given):
    parser = ArgumentParser()
    job.add_arguments(parser)
    return parser.parse_args(given)


def screen(host, told=CONTEXT, *given):
    """The text and the exit code on one node."""
    outcome = job.examine(host, told, options(*given), ())
    text = report.as_text(outcome.findings, outcome.title, outcome.nodes)
    assert len(text.splitlines()) <= SCREEN
    return text, report.exit_code(outcome.findings)


def first(text):
    """The first finding: what the reader sees below the title."""
    return text.splitlines()[1]


@pytest.fixture
def host(tmp_path):
    made = healthy(tmp_path, Denied(), kind="p5.48xlarge")
    del made.environ["SLURM_JOB_NODELIST"]
    return made


P5 = replace(CONTEXT, kind="p5.48xlarge")


def test_a_healthy_node_is_said_to_be_so_with_what_was_not_checked(host):
    text, code = screen(host, P5)
    assert code == 0
    assert "not checked" in text
    assert text.splitlines()[-1].startswith("verdict: nothing wrong in what")


def test_a_p5en_config_on_a_p5(host):
    text, code = screen(host, replace(P5, kind="p5en.48xlarge"))
    assert code == 3
    assert first(text) == "FAIL  machine-kind: this is a p5.48xlarge, the job is for p5en.48xlarge"
    assert text.count("FAIL") == 1


def test_a_wrong_number_of_efa_devices(host):
    for i in range(4, 32):
        host.at(f"/sys/class/infiniband/rdmap{i}s0/device/driver").unlink()
    text, code = screen(host, P5)
    assert code == 3
    assert first(text).startswith("FAIL  efa-devices: 4 EFA devices, a p5.48xlarge has 32")
    assert "vpc.amazonaws.com/efa: 32" in text


def test_a_missing_plugin(host):
    host.at(PLUGIN).unlink()
    host.environ |= {"NCCL_NET_PLUGIN": "spcx", "NVIDIA_PYTORCH_VERSION": "26.07"}
    text, code = screen(host, P5)
    assert code == 3
    assert "FAIL  plugin-found: NCCL will find none of libnccl-net-spcx.so" in text
    assert "26.06" in text
    assert "TCP" in text


def test_a_run_that_fell_back_to_tcp(host):
    host.put("/run.log", "node0:1:1 NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n")
    text, code = screen(host, replace(P5, logs=(host.at("/run.log"),)))
    assert code == 3
    assert first(text).startswith("FAIL  plugin-selected: NCCL uses sockets (NET/Socket)")


def test_a_login_node_is_not_blamed_for_having_no_devices(tmp_path):
    login = bare(tmp_path, Denied())
    outcome = job.examine(login, replace(P5, logs=()), options("--login"), ())
    asked = {finding.check for finding in outcome.findings}
    assert "security-group" in asked
    assert "expandable-segments" in asked
    assert not asked & {"efa-devices", "memlock", "gpus", "plugin-found"}
    assert report.exit_code(outcome.findings) == 0
    assert report.exit_code(job.examine(login, P5, options(), ()).findings) == 3


def several(tmp_path, ranks, world, *given, spoil=None, locals_=1, apart=(), nodes=None):
    """Outcomes by rank of the doctor in threads, each on a host of its own.

    A fake root is a file system: what hosts share is a link to one folder, but for those `apart`.
    """
    port, done, hosts = free_port(), {}, {}
    told = replace(CONTEXT, nodes=nodes)
    (tmp_path / "shared").mkdir()
    for rank in ranks:
        host = hosts[rank] = healthy(tmp_path / str(rank), Denied())
        host.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(locals_),
            "LOCAL_RANK": str(rank % locals_), "MASTER_ADDR": "127.0.0.1",
            "MEGATRON_EFA_HOST": f"ip-10-0-0-{rank // locals_ + 1}",
        }  # fmt: skip
        if rank not in apart:
            host.at("/fsx/run/x").unlink()
            host.at("/fsx/run").rmdir()
            host.at("/fsx/run").symlink_to(tmp_path / "shared")
        if spoil:
            spoil(rank, host)

    def node(rank):
        done[rank] = job.examine(hosts[rank], told, options("--port", str(port), *given), ())

    threads = [threading.Thread(target=node, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert set(done) == set(ranks)
    return dict(sorted(done.items()))


def test_three_of_four_nodes_up(tmp_path):
    done = several(tmp_path, [0, 1, 3], 4, "--wait", "5", "--no-network")
    head = done[0]
    text = report.as_text(head.findings, head.title, head.nodes)
    assert len(text.splitlines()) <= SCREEN
    assert first(text).startswith("FAIL  nodes: 3 of 4 nodes up: ip-10-0-0-3 did not answer within")
    assert [o.code for o in done.values()] == [3, 3, 3]
    assert [o.quiet for o in done.values()] == [False, True, True]


def test_a_node_that_differs_is_named_and_equal_findings_are_one(tmp_path):
    def spoil(rank, host):
        host.put("/proc/self/limits", "Max locked memory  65536  65536  bytes\n")
        if rank == 2:
            host.put(PLUGIN, b"NET/OFI aws-ofi-nccl 1.17.3")

    head = several(tmp_path, range(3), 3, "--wait", "20", "--no-network", spoil=spoil)[0]
    text = report.as_text(head.findings, head.title, head.nodes)
    assert "FAIL  agreement: plugin 1.17.3 on ip-10-0-0-3, 1.21.1 on the others" in text
    assert text.count("FAIL  memlock") == 1
    assert "on all 3 nodes" in text


def test_a_folder_that_is_not_shared_is_found_by_writing_and_nothing_is_left_there(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(job, "PATIENCE_S", 0.5)
    head = several(tmp_path, range(3), 3, "--wait", "20", "--no-network", apart=[1])[0]
    (finding,) = [f for f in head.findings if f.check == "shared-write"]
    assert finding.level == "fail"
    assert "do not see what others wrote" in finding.what
    assert not list((tmp_path / "shared").iterdir())


def test_another_number_of_nodes_than_the_job_is_for_is_told(tmp_path):
    head = several(tmp_path, range(2), 2, "--wait", "20", "--no-network", nodes=4)[0]
    (finding,) = [f for f in head.findings if f.check == "nodes"]
    assert finding.what == "2 nodes were started, the job is for 4"


def test_two_processes_a_node_check_the_node_once(tmp_path):
    head = several(tmp_path, range(4), 4, "--wait", "20", "--no-network", locals_=2)[0]
    assert [f.node for f in head.findings if f.check == "memlock"] == ["ip-10-0-0-1", "ip-10-0-0-2"]
    assert "2 of 2 nodes up" in head.title


def test_a_process_that_is_stuck_is_ended_with_a_line_that_names_its_node():
    stuck = (
        "from megatron.efa.doctor import job; import time; "
        "job._last_resort(0.2, 'node1, rank 3'); time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", stuck], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 3
    assert "within 0.2 s on node1, rank 3" in done.stderr


WELL, WARNING = ok("well"), warn("w", why="y", do="d")
FAILURE = fail("f", why="y", do="d")


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([], 0),
        ([WELL, Finding("info", "i"), Finding("skipped", "s")], 0),
        ([WELL, WARNING], 1),
        ([WARNING, FAILURE, WELL], 3),
    ],
)
def test_the_exit_code_is_0_well_1_warnings_3_failures(found, code):
    assert report.exit_code(found) == code


def test_failures_come_first_then_warnings_and_many_nodes_are_abbreviated():
    found = [replace(WARNING, check="a"), WELL]
    found += [replace(FAILURE, check="b", node=f"n{i}") for i in range(9)]
    lines = report.as_text(found, "title", 12).splitlines()
    assert lines[1] == "FAIL  b: f on n0, n1, n2, n3 and 5 more"
    assert lines[4].startswith("WARN  a")


def test_json_holds_every_finding_and_the_code():
    found = [replace(FAILURE, check="b", node="n1"), replace(WELL, check="c")]
    said = json.loads(report.as_json(found, "job"))
    assert said["exit_code"] == 3
    assert said["counts"]["fail"] == 1
    assert said["findings"][0] == {
        "level": "fail", "what": "f", "where": "", "why": "y", "do": "d",
        "check": "b", "node": "n1",
    }  # fmt: skip


def test_nothing_seen_is_not_called_well():
    assert "nothing could be checked" in report.as_text([Finding("skipped", "s")], "t")


@pytest.mark.parametrize("run", [lambda *_: [], lambda *_: 1 / 0])
def test_a_check_that_is_silent_or_broken_is_a_warning_that_names_it(run, host):
    (finding,) = findings(Check("mine", "title", (), run), host, CONTEXT)
    assert finding.level == "warn"
    assert "mine" in finding.do


def test_two_checks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="memlock"):
        registry.check("memlock", "again")(lambda *_: [])


def test_every_known_failure_that_software_sees_is_covered_by_a_check():
    by_nature = {"F11"}  # a wrong threshold in others' tools: here every one is the fleet's median
    covered = {failure for one in registry.checks() for failure in one.covers} | by_nature
    assert covered >= {f"F{i:02}" for i in range(1, 31)}


def test_every_check_is_in_the_documentation():
    page = (ROOT / "docs/doctor.md").read_text()
    for name in [*(one.id for one in registry.checks()), *job.CHECKS]:
        assert f"| `{name}` |" in page


def test_the_config_tells_where_checkpoints_go_and_how_large_they_are():
    told = context.read(str(ROOT / "examples/trillion/efa-1t-p5en.yaml"), ["train.save=/fsx/x"])
    assert told.get("save") == "/fsx/x"
    assert 12e12 < told.checkpoint_bytes < 16e12  # a trillion parameters, 14 bytes each
    small = context.read(
        str(ROOT / "examples/trillion/efa-1t-p5en.yaml"), ["train.no_save_optim=true"]
    )
    assert small.checkpoint_bytes == pytest.approx(told.checkpoint_bytes / 7)
    fewer = context.read(str(ROOT / "examples/trillion/efa-1t-p5en.yaml"), ["model.num_experts=64"])
    assert fewer.checkpoint_bytes < 0.7 * told.checkpoint_bytes


def test_the_config_of_a_launch_tells_kind_and_number_of_nodes_unless_they_are_given(tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text("launch: {kind: p5en.48xlarge, nodes: 16}\ntrain: {save: /fsx/x}\n")
    told = context.read(str(config))
    assert (told.kind, told.nodes) == ("p5en.48xlarge", 16)
    assert "kind" not in told.settings
    given = context.read(str(config), kind="p5.48xlarge", nodes=4)
    assert (given.kind, given.nodes) == ("p5.48xlarge", 4)


def test_a_kind_that_does_not_exist_is_refused_at_once():
    assert context.read(None, kind="ml.p5.48xlarge").kind == "p5.48xlarge"
    with pytest.raises(EfaError, match=r"p5.48xlarge"):
        context.read(None, kind="p5.48xlrge")


def test_the_command_lists_checks_refuses_unknown_ones_and_needs_no_job(capsys):
    assert cli.main(["doctor", "--list"]) == 0
    assert "memlock" in capsys.readouterr().out
    assert cli.main(["doctor", "--only", "memlok"]) == 2
    assert "memlock" in capsys.readouterr().err
    assert cli.main(["doctor", "--log", "/nowhere.log"]) == 2
    assert cli.main(["doctor", "--json", "--only", "memlock"]) in (0, 1, 3)
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["check"] == "memlock"
