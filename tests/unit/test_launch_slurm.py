"""The rendered script under a real Slurm of one node, where its programs are installed."""

import os
import shutil
import socket
import subprocess
import time

import pytest

from megatron.efa.launch import cli, job, record

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))),
    reason="needs root and Debian's slurm-wlm",
)

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/linear
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=train Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def free_ports():
    with socket.create_server(("", 0)) as one, socket.create_server(("", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A slurmctld and a slurmd; skips where they do not come up."""
    (tmp_path / "state").mkdir()
    (tmp_path / "spool").mkdir()
    host = socket.gethostname().split(".")[0]
    conf = tmp_path / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=tmp_path, ports=free_ports()))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons = [subprocess.Popen([d, "-D", "-f", str(conf)], **streams) for d in DAEMONS]
    try:
        for _ in range(120):
            told = subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True)
            if told.stdout.strip() == "idle":
                break
            time.sleep(0.5)
        else:
            pytest.skip("Slurm's daemons do not come up here")
        yield
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=30)


DAEMONS = ("slurmctld", "slurmd")


def test_slurm_accepts_the_script_and_runs_it_to_its_end(slurm, tmp_path):
    """The script's own loop and srun, our launcher and torchrun; the ranks run a small script."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[2]).with_name('ran-' + os.environ['RANK']).touch()\n"
    )
    words = ["cluster=cpu", "launch.nodes=1", "launch.ranks_per_node=2", f"launch.runs={tmp_path}"]
    words += ["launch.name=run", f"launch.python={os.sys.executable}", f"launch.script={script}"]
    words += ["launch.time=10", "launch.slurm.partition=train"]
    made = job.build("examples/mock.yaml", words, "slurm")
    record.write(made.run, cli.render(made))
    file = made.run / "job.sbatch"
    tested = subprocess.run(["sbatch", "--test-only", file], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stderr
    done = subprocess.run(["sbatch", "--wait", file], capture_output=True, text=True, timeout=300)
    said = "".join(log.read_text() for log in made.run.glob("slurm-*.log"))
    assert done.returncode == 0, said
    assert (made.run / "state").read_text() == "done 0\n"
    assert (made.run / "ran-0").exists()
    assert (made.run / "ran-1").exists()
    assert "placement: " in said
