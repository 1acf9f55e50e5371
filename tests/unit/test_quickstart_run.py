"""A quickstart takes a folder of its own, and says what is wrong before it makes anything."""

import importlib.util
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from megatron.efa.config.compose import compose
from megatron.efa.emulate import processes
from megatron.efa.errors import EfaError
from megatron.efa.quickstart import run
from megatron.efa.quickstart.prepare import ROOT, Data

ARGS = Namespace(nodes=2, ranks_per_node=2, rate="1gbit", gpu=False)


def tool():
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "tools" / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_run_has_a_folder_of_its_own(tmp_path):
    assert run.new_folder(tmp_path).name == "quickstart-1"
    (tmp_path / "quickstart-9").mkdir()
    (tmp_path / "quickstart-data").mkdir()
    assert run.new_folder(tmp_path).name == "quickstart-10"


@pytest.mark.parametrize("name", ["plain", "with space", "it's,odd=[x]", "a$b{c}"])
def test_overrides_name_the_folders_whatever_they_are_called(tmp_path, name):
    folder = tmp_path / name
    overrides = run.run_overrides(Data(folder / "quickstart-data"), folder / "quickstart-1")
    found = {s.key: s.value for s in compose(str(run.CONFIG), overrides)}
    assert found["train_data_path"] == [f"{folder}/quickstart-data/train_text_document"]
    assert found["tokenizer_model"] == f"{folder}/quickstart-data/tokenizer"
    assert found["save"] == f"{folder}/quickstart-1/checkpoints"
    assert found["tensorboard_dir"] == f"{folder}/quickstart-1/tensorboard"


def test_the_config_names_the_usual_data_itself():
    usual = Data(ROOT / "runs" / "quickstart-data")
    overrides = run.run_overrides(usual, ROOT / "runs" / "quickstart-1")
    assert overrides == [
        "train.save=runs/quickstart-1/checkpoints",
        "train.tensorboard_dir=runs/quickstart-1/tensorboard",
    ]
    found = {s.key: s.value for s in compose(str(run.CONFIG))}
    assert [ROOT / path for path in found["train_data_path"]] == [usual.train]
    assert [ROOT / path for path in found["valid_data_path"]] == [usual.valid]
    assert ROOT / found["tokenizer_model"] == usual.tokenizer


def test_the_command_that_trains_on_doubles_the_steps_and_loads_what_was_saved():
    folder = ROOT / "runs" / "quickstart-1"
    first = run.Run(folder, ["train.save=runs/quickstart-1/checkpoints", "train.train_iters=7"])
    words = shlex.split(shlex.join(run.emulate(ARGS, first.resumed())))
    found = {s.key: s.value for s in compose(str(run.CONFIG), words[words.index("--config") + 2 :])}
    assert found["train_iters"] == 14
    assert found["load"] == found["save"] == "runs/quickstart-1/checkpoints"


@pytest.mark.parametrize("gpu", [False, True])
def test_gpus_are_asked_of_the_emulator_and_of_megatron_together(gpu):
    args = Namespace(**{**vars(ARGS), "gpu": gpu})
    words = run.emulate(args, run.device_overrides(args))
    found = {s.key: s.value for s in compose(str(run.CONFIG), words[words.index("--config") + 2 :])}
    assert ("--gpu" in words[: words.index("--")]) == gpu
    assert found["distributed_backend"] == ("nccl" if gpu else "gloo")


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("train_iters=3", "train_iters"),
        ("train.lr=[", "train.lr=["),
        ("train.train_iters=null", "take train_iters away"),
    ],
)
def test_a_bad_override_is_one_line_and_makes_nothing(tmp_path, word, complaint, capsys):
    runs = tmp_path / "runs"
    assert tool().main(["--runs", str(runs), word]) == 2
    said = capsys.readouterr().err
    assert said.startswith("quickstart: ")
    assert complaint in said
    assert said.count("\n") == 1
    assert not runs.exists()


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("x\npretrain_gpt.py: no such file\nmegatron-efa: rank 0 ended first\n", "no such file"),
        ("x\nmegatron-efa: 3 is no rate\n", "3 is no rate"),
        ("Traceback\n", ""),
    ],
)
def test_a_failed_training_is_told_with_its_reason_and_log(tmp_path, log, reason):
    job = run.Run(tmp_path, [])
    script = f"import sys; print({log!r}, end=''); sys.exit(3)"
    with pytest.raises(EfaError) as error:
        run.train([sys.executable, "-c", script], job, print)
    said = str(error.value)
    assert said.startswith("training failed with exit code 3")
    assert said.endswith(f": see {tmp_path}/train.log")
    assert reason in said


def test_losses_are_told_once_with_the_validation_of_their_step(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    said = []
    with SummaryWriter(tmp_path) as writer:
        for step in range(1, 12):
            writer.add_scalar("lm loss", 7.0 - step / 100, step)
        writer.add_scalar("lm loss validation", 6.5, 10)
        writer.add_scalar("lm loss", 6.75, 20)
    told = run._tell_losses(tmp_path, 0, said.append, ended=False)
    assert told == 10
    assert run._tell_losses(tmp_path, told, said.append, ended=False) == 10
    assert run._tell_losses(tmp_path, told, said.append, ended=True) == 20
    assert [line.split() for line in said] == [
        ["train:", "step", "1", "loss", "6.990"],
        ["train:", "step", "10", "loss", "6.900", "held", "out", "6.500"],
        ["train:", "step", "20", "loss", "6.750"],
    ]


def test_short_paths_are_those_one_types_in_the_root():
    assert run.short(ROOT / "runs" / "x") == "runs/x"
    assert run.short(Path("/elsewhere/x")) == "/elsewhere/x"


def test_a_folder_that_cannot_be_written_is_one_line(capsys):
    assert tool().main(["--runs", "/dev/null/runs"]) == 2
    assert capsys.readouterr().err == "quickstart: /dev/null/runs: Not a directory\n"


def test_a_killed_quickstart_takes_its_training_along(tmp_path):
    training = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    code = (
        "import sys; from pathlib import Path; from megatron.efa.quickstart import run; "
        f"run.train([sys.executable, '-c', {training!r}], run.Run(Path(sys.argv[1]), []), print)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    log = tmp_path / "train.log"
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    pid = int(log.read_text())
    killed.kill()
    killed.wait()
    # None when it is gone; Z where nobody has reaped it yet.
    wait_for(lambda: (processes.stat_fields(pid) or ["Z"])[0] == "Z")


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
