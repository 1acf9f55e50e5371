"""Jobs run under real torchrun on the nodes, end as a whole, and leave nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import observe
import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

ROOT = Path(__file__).resolve().parents[2]
SIZE = 40_000_000

ALL_REDUCE = f"""
import json, os, socket, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
me = {{name: os.environ[name] for name in names}}
tensor = torch.full(({SIZE // 4},), float(dist.get_rank() + 1))
dist.barrier()
start = time.perf_counter()
dist.all_reduce(tensor)
seconds = time.perf_counter() - start
me.update(hostname=socket.gethostname(), sum=tensor[-1].item(), seconds=seconds, argv=sys.argv[1:])
print("RESULT " + json.dumps(me), flush=True)
dist.destroy_process_group()
"""
WAIT = """
import os, pathlib, subprocess, sys, time
print("up", os.environ["RANK"], flush=True)
pathlib.Path(sys.argv[1], "up" + os.environ["RANK"]).touch()
subprocess.Popen(["setsid", "sleep", "1000"])
time.sleep(float(sys.argv[2]))
"""
CRASH = """
import os, sys, time
print("up", os.environ["RANK"], flush=True)
if os.environ["RANK"] == "1":
    time.sleep(1)
    print("crashed at", time.time(), flush=True)
    os.kill(os.getpid(), 9) if sys.argv[1] == "kill" else sys.exit(5)
time.sleep(1000)
"""


class Run:
    """`megatron-efa emulate` as a user starts it, with a name of its own."""

    def __init__(self, tmp_path, script, *arguments, options=(), prefix=(), nodes=2, per_node=1):
        self.name = f"test-{uuid.uuid4().hex[:12]}"
        self.logs = tmp_path / f"logs-{self.name}"
        self.json = tmp_path / f"{self.name}.json"
        path = tmp_path / f"{self.name}.py"
        path.write_text(script)
        command = [*prefix, sys.executable, "-m", "megatron.efa", "emulate"]
        command += ["--nodes", str(nodes), "--ranks-per-node", str(per_node), "--name", self.name]
        command += ["--log-dir", str(self.logs), "--json", str(self.json), *options]
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [*command, "--", str(path), *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, timeout=100):
        """Wait for the end; returns exit code, stdout and stderr."""
        try:
            output, errors = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            raise
        return self.process.returncode, output, errors

    def wait_up(self, directory, ranks=2, timeout=60):
        """Wait until all ranks of the WAIT script run; returns the network namespaces in use."""
        deadline = time.monotonic() + timeout
        while not all((directory / f"up{rank}").exists() for rank in range(ranks)):
            assert time.monotonic() < deadline, self.logs
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        time.sleep(0.2)  # until the grandchild of each rank is there as well
        return observe.namespaces(self.name)


@pytest.fixture
def place(tmp_path):
    directory = tmp_path / "up"
    directory.mkdir()
    return directory


def results(output):
    return [json.loads(line[7:]) for line in output.splitlines() if line.startswith("RESULT ")]


def test_an_all_reduce_crosses_the_links_as_the_algorithm_says_and_at_their_rate(tmp_path):
    run = Run(tmp_path, ALL_REDUCE, "--nodes", "x=1", options=["--rate", "400mbit"])
    code, output, errors = run.finish()
    assert code == 0, errors
    shown = results(output)
    assert sorted(rank["RANK"] for rank in shown) == ["0", "1"]
    for rank in shown:
        assert rank["hostname"] == f"node{rank['RANK']}" == f"node{rank['GROUP_RANK']}"
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"]) == ("2", "1")
        assert (rank["LOCAL_RANK"], rank["OMP_NUM_THREADS"]) == ("0", "1")
        assert rank["sum"] == 3.0
        assert rank["argv"] == ["--nodes", "x=1"]
        # A ring over N nodes sends 2 (N - 1) / N of the tensor from each node, at the link's rate.
        assert observe.at_rate(SIZE * 8 / rank["seconds"], 400e6)
    summary = json.loads(run.json.read_text())
    for link in summary["links"]:
        assert link["sent_bytes"] == pytest.approx(SIZE, rel=0.03)
        assert link["received_bytes"] == pytest.approx(SIZE, rel=0.03)
    assert (summary["exit_code"], summary["failure"], summary["isolated"]) == (0, None, True)
    assert re.search(rf"node1 +{summary['links'][1]['sent_bytes'] / 1e6:.2f} ", output)
    assert results((run.logs / "rank1.log").read_text()) == [shown[-1]] or len(shown) == 2
    observe.wait_until_gone(run.name, set())


@pytest.mark.parametrize(
    ("how", "code", "said"), [("kill", 137, "signal SIGKILL"), ("exit", 5, "exit code 5")]
)
def test_a_rank_that_dies_ends_the_job_within_seconds_and_is_named(tmp_path, how, code, said):
    run = Run(tmp_path, CRASH, how, options=["--show", "0"])
    returned, output, errors = run.finish()
    ended = time.time()
    assert returned == code
    message = errors.splitlines()[-1]
    assert f"rank 1 (node1, local rank 0) ended first, with {said}: see {run.logs}" in message
    crashed = re.search(r"crashed at ([\d.]+)", errors)  # the tail of its log
    assert ended - float(crashed[1]) < 8
    assert "up 0" in output
    assert json.loads(run.json.read_text())["failure"]["rank"] == 1
    observe.wait_until_gone(run.name, set())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_and_leaves_nothing(tmp_path, place, number):
    run = Run(tmp_path, WAIT, place, 1000)
    spaces = run.wait_up(place)
    assert len(spaces) == 3
    run.process.send_signal(number)
    code, _, errors = run.finish(timeout=20)
    assert code == 128 + number
    assert number.name in errors
    observe.wait_until_gone(run.name, spaces)
    assert not observe.claimed(run.name).exists()


def test_after_kill_9_nothing_runs_and_an_emulation_beside_it_goes_on(tmp_path, place):
    beside = tmp_path / "beside"
    beside.mkdir()
    killed, other = Run(tmp_path, WAIT, place, 1000), Run(tmp_path, WAIT, beside, 12)
    spaces, other_spaces = killed.wait_up(place), other.wait_up(beside)
    assert len(spaces) == len(other_spaces) == 3
    assert not spaces & other_spaces
    killed.process.kill()
    killed.process.communicate()
    observe.wait_until_gone(killed.name, spaces)
    assert observe.claimed(killed.name).exists()
    assert Run(tmp_path, "", options=["--timeout", "0"]).finish()[0] == 124  # the next start
    assert not observe.claimed(killed.name).exists()
    code, output, errors = other.finish()
    assert (code, sorted(output.splitlines()[:2])) == (0, ["up 0", "up 1"]), errors
    observe.wait_until_gone(other.name, other_spaces)


def test_without_root_the_same_ranks_run_as_local_processes_and_it_is_said(tmp_path):
    # The interpreter of a test machine may be where only root can read: leave that one capability.
    kept = "-all,+dac_read_search"
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    nobody += [f"--{kind}={kept}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and directory.is_relative_to(
            "/tmp/pytest-of-root"
        ):
            directory.chmod(0o755)
    tmp_path.chmod(0o777)
    run = Run(tmp_path, ALL_REDUCE, prefix=nobody, per_node=2, options=["--show", "all"])
    code, output, errors = run.finish()
    assert code == 0, errors
    said = errors.splitlines()
    assert len(said) == 1
    assert "need root" in said[0]
    assert "plain local processes" in said[0]
    ranks = [json.loads(words) for words in re.findall(r"RESULT (.*)", output)]
    layout = sorted((r["RANK"], r["GROUP_RANK"], r["LOCAL_RANK"], r["sum"]) for r in ranks)
    assert layout == [
        ("0", "0", "0", 10),
        ("1", "0", "1", 10),
        ("2", "1", "0", 10),
        ("3", "1", "1", 10),
    ]
    assert "not counted" in output
    summary = json.loads(run.json.read_text())
    assert (summary["links"], summary["isolated"]) == (None, False)
    observe.wait_until_gone(run.name, set())
