"""The entry tells a bad argument in one line, on rank 0, and keeps every other traceback."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from megatron.efa import entry
from megatron.efa.errors import EfaError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run an entry point whose command line is already read; returns exit code and stderr."""
    monkeypatch.setattr(entry, "prepare", lambda argv, rank: list(argv))
    monkeypatch.setattr(entry, "_GRACE_S", 0.01)
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def run(configure, train=lambda job: None, rank=0, local_rank=0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        code = entry.run(configure, train, ["--lr", "1"])
        return code, capsys.readouterr().err

    return run


def refuse(error):
    def configure():
        raise error

    return configure


def test_what_configure_returns_is_trained(run):
    trained = []
    assert run(lambda: sys.argv[1:], trained.append) == (0, "")
    assert trained == [["--lr", "1"]]


@pytest.mark.parametrize(
    ("tasks", "code", "met"),
    [
        ({}, 0, ["127.0.0.1"]),
        ({"WORLD_SIZE": "2"}, 2, []),  # here someone else was to say where
        ({"SLURM_STEP_NUM_TASKS": "4"}, 2, []),
    ],
)
def test_one_process_needs_no_torchrun_but_several_do(no_launcher, run, tasks, code, met):
    for name, value in tasks.items():
        no_launcher.setenv(name, value)
    seen = []
    assert entry.run(lambda: None, lambda _: seen.append(os.environ["MASTER_ADDR"]), []) == code
    assert seen == met


@pytest.mark.parametrize("error", [AssertionError("too\nbig"), ValueError("too big")])
def test_upstreams_refusal_is_one_line(run, error):
    code, told = run(refuse(error))
    assert code == 2
    assert told.startswith("pretrain_gpt.py: too big (Megatron's check at test_entry.py:")
    assert told.count("\n") == 1


def test_an_assertion_without_words_is_told_by_its_condition(run):
    # pytest rewrites assert statements, so this one is compiled apart
    scope = {}
    source = "def configure():\n    size = 3\n    assert size == 4\n"
    file = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent / "checks.py"
    file.write_text(source)
    exec(compile(source, str(file), "exec"), scope)
    assert (
        "this does not hold: size == 4 (Megatron's check at checks.py:3)"
        in run(scope["configure"])[1]
    )


def test_a_bare_exit_of_upstreams_is_not_success(run):
    assert run(refuse(SystemExit()))[0] == 2


def test_a_fault_of_the_programs_keeps_its_traceback(run):
    with pytest.raises(KeyError):
        run(refuse(KeyError("x")))


def test_a_training_error_keeps_its_traceback(run):
    with pytest.raises(ValueError, match="diverged"):
        run(lambda: 1, lambda job: refuse(ValueError("diverged"))())


def test_an_efa_error_in_training_names_its_rank(run):
    code, told = run(lambda: 1, lambda job: refuse(EfaError("link down"))(), rank=5, local_rank=1)
    assert code == 2
    assert told.startswith("pretrain_gpt.py: rank 5 on ")
    assert told.endswith(": link down\n")


@pytest.mark.parametrize("local_rank", [0, 1])
def test_another_rank_waits_for_those_that_speak_before_it(run, monkeypatch, local_rank):
    waits = []
    monkeypatch.setattr(entry.time, "sleep", waits.append)
    code, told = run(refuse(EfaError("no file")), rank=8 + local_rank, local_rank=local_rank)
    assert code == 2
    assert told.startswith(f"pretrain_gpt.py: rank {8 + local_rank} on ")
    assert waits[0] > local_rank * entry._GRACE_S


def upstream(folder, source, place="core/model.py"):
    """Return what `source`, lying where upstream's code does, defines."""
    file = folder / "megatron" / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    scope = {}
    exec(compile(source, str(file), "exec"), scope)
    return scope


REFUSAL = """
def setup(self):
    assert self.warmup < self.decay
def train(f, *x):
    f(*x)
"""


class Steps:
    warmup, decay = 5, 3


def test_a_check_of_upstreams_before_training_is_one_line_with_its_values(run, tmp_path):
    setup = upstream(tmp_path, REFUSAL)["setup"]
    assert run(lambda: Steps, setup) == (
        2,
        "pretrain_gpt.py: this does not hold: self.warmup < self.decay, with warmup = 5 and "
        "decay = 3 (Megatron's check at model.py:3)\n",
    )
    left = json.loads(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).read_text())
    assert "Traceback" in left["message"]["extraInfo"]["py_callstack"]


def test_the_same_check_in_the_training_loop_keeps_its_traceback(run, tmp_path):
    setup = upstream(tmp_path, REFUSAL)["setup"]
    loop = upstream(tmp_path, REFUSAL, "training/training.py")["train"]
    with pytest.raises(AssertionError):
        run(lambda: Steps, lambda job: loop(setup, job))


def test_the_traceback_of_a_check_can_be_asked_for(run, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_EFA_TRACEBACK", "1")
    with pytest.raises(AssertionError):
        run(lambda: Steps, upstream(tmp_path, REFUSAL)["setup"])


def test_warnings_are_shown_unless_an_error_is(run):
    def configure(error=None):
        warnings.warn("no Apex", stacklevel=1)
        if error:
            raise error

    assert "no Apex" not in run(lambda: configure(EfaError("bad")))[1]
    with pytest.warns(UserWarning, match="no Apex"):
        assert run(configure)[0] == 0


def test_a_machine_without_gpu_is_told_of_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(entry.cpu, "enabled", lambda: False)
    with pytest.raises(EfaError, match=r"finds no GPU on .*: add --distributed-backend gloo"):
        entry._check_device()
    monkeypatch.setattr(entry.cpu, "enabled", lambda: True)
    entry._check_device()


ALONE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STEPS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.fixture
def no_launcher(monkeypatch):
    """An environment that no launcher made, restored afterwards whatever is set in it."""
    for name in (*ALONE, *STEPS):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    return monkeypatch


def test_without_torchrun_a_process_is_a_job_of_one_rank(no_launcher):
    entry._be_one_rank_alone()
    assert [os.environ[name] for name in ALONE[:4]] == ["0", "0", "1", "127.0.0.1"]


def test_torchruns_own_settings_are_left_alone(no_launcher):
    ours = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "head", "MASTER_PORT": "1"}
    for name, value in ours.items():
        no_launcher.setenv(name, value)
    entry._be_one_rank_alone()
    assert {name: os.environ[name] for name in ours} == ours
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.parametrize("name", ["WORLD_SIZE", *STEPS])
def test_tasks_that_cannot_find_one_another_do_not_train_alone(no_launcher, name):
    no_launcher.setenv(name, "4")
    with pytest.raises(EfaError, match=f"{name}=4 but MASTER_ADDR is not set"):
        entry._be_one_rank_alone()


def test_torchrun_is_left_the_sentence(run):
    run(refuse(EfaError("no file")), rank=9, local_rank=1)
    left = json.loads(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).read_text())
    assert left["message"]["message"] == "no file"


def test_yaml_that_is_wrong_fails_before_megatron_is_imported(tmp_path):
    (tmp_path / "bad.yaml").write_text("model: [\n")
    code = (
        "import sys, pretrain_gpt\n"
        "from megatron.efa import entry\n"
        "code = entry.run(pretrain_gpt.configure, pretrain_gpt.train, sys.argv[1:])\n"
        "assert 'megatron.core' not in sys.modules and 'torch' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", code, "--config", str(tmp_path / "bad.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "bad.yaml:2: not valid YAML" in done.stderr
