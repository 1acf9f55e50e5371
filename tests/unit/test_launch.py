"""From a config to the files of a run; and what is said of a launch that cannot work."""

import json
import shutil
import subprocess

import pytest

from megatron.efa import cli as tool
from megatron.efa.cluster.catalogue import machine
from megatron.efa.config.compose import compose
from megatron.efa.errors import EfaError
from megatron.efa.launch import cli, job, progress, record
from megatron.efa.launch.environment import device_connections

CONFIG = "examples/trillion/kimi-k2-p5en.yaml"
P5EN = ["launch.nodes=128", "launch.kind=p5en.48xlarge"]


def build(*words, target="slurm", **options):
    return job.build(CONFIG, [*P5EN, *words], target, **options)


def script(*words, **options):
    return cli.render(build(*words, **options))["job.sbatch"]


def checked(text, tmp_path):
    """The script, if bash and shellcheck have nothing to say."""
    file = tmp_path / "job.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    return text


def test_a_slurm_script_starts_one_launcher_a_node(tmp_path):
    text = checked(script(), tmp_path)
    assert "#SBATCH --nodes=128\n#SBATCH --ntasks-per-node=1\n#SBATCH --exclusive\n" in text
    assert "container=()" in text
    assert "--time" not in text
    assert "--signal" not in text


def test_containers_and_the_clusters_own_options_are_passed_on(tmp_path):
    words = ["launch.image='/fsx/it\\'s.sqsh'", "launch.mounts=[/fsx:/fsx]"]
    words += ["launch.time=2-00:00:00"]
    words += ["launch.slurm.partition=gpu-p6b200", "launch.slurm.segment=16"]
    words += ["launch.slurm.options=['--comment=x']", "launch.slurm.exclusive_topology=true"]
    text = checked(script(*words), tmp_path)
    assert "#SBATCH --signal=B:USR1@600\n" in text
    assert "#SBATCH --exclusive=topo\n" in text
    assert "#SBATCH --segment=16\n#SBATCH --time=2-00:00:00\n" in text
    assert "#SBATCH --comment=x\n" in text
    assert "--container-mounts=/fsx:/fsx," in text
    assert "if [ ! -e " in text


def test_every_shell_script_is_sound(tmp_path):
    checked(cli.render(build(target="torchrun", preflight=True))["torchrun.sh"], tmp_path)
    words = ["cluster=cpu", "launch.nodes=2", "launch.ranks_per_node=1", "launch.runs=/a b"]
    made = job.build("examples/mock.yaml", words, "emulated")
    checked(cli.render(made)["job.sh"], tmp_path)


def test_a_restart_loads_what_was_saved_and_hangs_leave_evidence():
    values = build().values
    assert values["load"] == values["save"]
    assert values["exit_signal_handler"] is True
    assert values["flight_recorder_dump_path"].endswith("/kimi-k2-p5en/flight-recorder")
    assert build("train.save=/fsx/mine").values["load"] == "/fsx/mine"
    made = build("train.load=/fsx/pretrained", "train.save_interval=5")
    assert len(made.notes) == 1
    assert "a restart loads the former again" in made.notes[0]


def test_what_ranks_read_is_the_config_and_nothing_else(tmp_path):
    made = build("train.lr=1e-4", "launch.env.NCCL_DEBUG=INFO")
    file = tmp_path / "config.yaml"
    file.write_text(made.config)
    again = {setting.key: setting.value for setting in compose(str(file))}
    assert again == made.values
    assert again["lr"] == 1e-4
    assert made.record()["environment"]["NCCL_DEBUG"] == "INFO"


def test_megatron_never_sees_the_launch_group(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("launch:\n  slurm: {partition: a}\nmodel:\n  num_layers: 2\n")
    assert [setting.key for setting in compose(str(file), ["launch.nodes=3"])] == ["num_layers"]


def test_connections_follow_what_must_overlap():
    hopper, blackwell = machine("p5.48xlarge"), machine("p6-b200.48xlarge")
    tensor, experts = {"tensor_model_parallel_size": 2}, {"overlap_moe_expert_parallel_comm": True}
    assert device_connections(tensor, hopper)[0] == "1"
    assert device_connections(tensor, blackwell) is None
    assert device_connections(tensor | experts, hopper)[0] == "32"
    assert device_connections({}, hopper) is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["launch.slurm.partitions=x"], r"launch.slurm.partitions; did you mean slurm.partition"),
        (["launch.node=3"], r"no key launch.node; did you mean nodes"),
        (["launch.nodes=0"], r"launch.nodes is missing or 0"),
        (["launch.nodes=-1"], r"launch.nodes is -1"),
        (["launch.nodes=many"], r"launch.nodes is 'many', but wants a whole number"),
        (["launch.nodes=100"], r"100 nodes of 8 ranks: .* does not divide 800 ranks"),
        (["launch.ranks_per_node=16"], r"but a p5en.48xlarge has 8 GPUs"),
        (["launch.kind=null"], r"how many ranks does a node hold"),
        (["launch.name=K2_run"], r"cannot be called 'K2_run'"),
        (["launch.slurm.segment=3"], r"segment is 3, which does not divide 128"),
        (["launch.time=soon"], r"launch.time is 'soon'"),
        (["launch.env.NCCL_NET=Socket"], r"NCCL is told to use TCP: unset it"),
        (["launch.plugin=new"], r"'new' is no version"),
        (["launch.slurm.auto_resume=perhaps"], r"must be on, off or detect"),
    ],
)
def test_what_is_wrong_with_a_launch_is_one_sentence(words, sentence):
    with pytest.raises(EfaError, match=sentence):
        script(*words)


def test_a_config_for_other_nodes_than_the_clusters_is_refused(tmp_path):
    nodes = "".join(f"  - {{name: h{i}, kind: p5.48xlarge}}\n" for i in range(128))
    file = tmp_path / "cluster.yaml"
    file.write_text(f"nodes:\n{nodes}")
    with pytest.raises(EfaError, match=r"launch.kind is p5en.48xlarge, but .* has p5.48xlarge"):
        build(f"launch.cluster={file}")
    file.write_text("nodes:\n  - {name: h, kind: p5en.48xlarge}\n")
    with pytest.raises(EfaError, match=r"launch.nodes is 128, but .* has 1"):
        build(f"launch.cluster={file}")


def test_a_wrong_target_and_stray_words_are_told(capsys):
    assert tool.main(["launch", "--target", "slrum", "--config", CONFIG]) == 2
    assert "did you mean slurm" in capsys.readouterr().err
    assert tool.main(["launch", "--target", "slurm", "--config", CONFIG, "nodes=3"]) == 2
    assert "'nodes=3' is no override" in capsys.readouterr().err
    assert tool.main(["launch", "--target", "slurm"]) == 2
    assert "give --config FILE" in capsys.readouterr().err
    assert tool.main(["launch", "--target", "emulated", "--config", CONFIG, *P5EN]) == 2
    assert "add cluster=cpu" in capsys.readouterr().err


def test_a_dry_run_shows_all_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NCCL_BUFFSIZE", "2097152")
    words = ["launch", "--target", "slurm", "--config", CONFIG, "--no-check", *P5EN]
    assert tool.main([*words, f"launch.runs={tmp_path}", "--dry-run"]) == 0
    said = capsys.readouterr()
    for name in ("run.json", "config.yaml", "environment", "job.sbatch"):
        assert f"==> {tmp_path}/kimi-k2-p5en/{name}\n" in said.out
    assert "NCCL_NET=AWS Libfabric  # " in said.out
    assert "warn: in this shell, NCCL_BUFFSIZE=2097152" in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_never_overwritten_by_accident(tmp_path, capsys):
    words = ["launch", "--target", "slurm", "--config", CONFIG, "--no-check", *P5EN]
    words.append(f"launch.runs={tmp_path}")
    assert tool.main([*words, "--again"]) == 2
    assert "there is no run in" in capsys.readouterr().err
    assert tool.main(words) == 0
    run = tmp_path / "kimi-k2-p5en"
    (run / "attempts").mkdir()
    before = (run / "job.sbatch").read_text()
    assert tool.main([*words, "launch.slurm.partition=x"]) == 2
    assert "add --again" in capsys.readouterr().err
    assert (run / "job.sbatch").read_text() == before
    assert tool.main([*words, "launch.slurm.partition=x", "--again"]) == 0
    assert "--partition=x" in (run / "job.sbatch").read_text()
    assert (run / "attempts").is_dir()
    assert tool.main(["status", str(run)]) == 0
    assert "rendered" in capsys.readouterr().out
    assert tool.main(["logs", str(run)]) == 2
    assert "has no logs yet" in capsys.readouterr().err
    assert tool.main(["status", str(tmp_path / "nothing")]) == 2


STUB = """#!/bin/bash
run=$1 restarts=2 nodes=1
step() {{ {step}; }}
requeue() {{ touch "$run/requeued"; }}
"""


def looped(tmp_path, step, interrupt=False):
    """Run the loop over attempts with a step of the test's; returns (exit code, state)."""
    from megatron.efa.launch.script import loop

    file = tmp_path / "loop.sh"
    file.write_text(STUB.format(step=step) + loop())
    done = subprocess.run(["bash", str(file), str(tmp_path)], capture_output=True, text=True)
    return done.returncode, (tmp_path / "state").read_text().split()[0]


FAIL = 'touch "$run/attempts/$1/failed-code-{}-rank-3-on-h"; return 1'


def attempts(tmp_path):
    return len(progress.attempts_of(tmp_path))


def test_the_loop_starts_again_after_failures_so_many_times(tmp_path):
    assert looped(tmp_path, FAIL.format(137)) == (1, "failed")
    assert attempts(tmp_path) == 3
    assert "rank 3 on h ended first, with signal 9" in progress.failure(tmp_path / "attempts/1")


def test_the_loop_ends_when_an_attempt_does_well(tmp_path):
    step = f'if [ "$1" = 1 ]; then {FAIL.format(1)}; fi'
    assert looped(tmp_path, step) == (0, "done")
    assert attempts(tmp_path) == 2


@pytest.mark.parametrize("code", [17, 2, 3])
def test_the_loop_does_not_repeat_what_would_fail_again(tmp_path, code):
    assert looped(tmp_path, FAIL.format(code)) == (code, "failed")
    assert attempts(tmp_path) == 1


def test_a_doubtful_step_is_repeated_and_not_counted_as_a_failure(tmp_path):
    assert looped(tmp_path, FAIL.format(16)) == (16, "failed")
    assert attempts(tmp_path) == 4


def test_wrong_results_outrank_the_failures_that_they_cause(tmp_path):
    both = f'touch "$run/attempts/$1/failed-code-1-rank-0-on-g"; {FAIL.format(17)}'
    assert looped(tmp_path, both) == (17, "failed")


def test_before_the_time_limit_ranks_are_told_and_the_job_queued_again(tmp_path):
    step = 'kill -USR1 $$; while [ ! -e "$run/stop" ]; do sleep 0.05; done'
    assert looped(tmp_path, step) == (0, "requeued")
    assert (tmp_path / "requeued").exists()
    assert attempts(tmp_path) == 1


def test_a_run_tells_its_steps_once_each(tmp_path):
    line = (
        " [2026-12-01 17:06:49] iteration {:8d}/{:8d} | consumed samples: 8 | elapsed time per "
        "iteration (ms): {:.1f} | learning rate: 9.98E-04 | global batch size:     8 | lm loss: "
        "{:.6E} | grad norm: 0.6 |\n"
    )
    record.write(tmp_path / "run", record.files(build(), {}))
    for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4))):
        folder = tmp_path / f"run/attempts/{attempt}/node-1/none_x/attempt_0/7"
        folder.mkdir(parents=True)
        text = "".join(line.format(s, 9, 100.0 * attempt, s + attempt) for s in steps)
        (folder / "stdout.log").write_text(text)
    told = progress.read(tmp_path / "run")
    assert [(step.step, step.loss) for step in told.steps] == [(1, 2), (2, 3), (3, 5), (4, 6)]
    assert told.attempts == 2
    assert told.tokens_per_s == pytest.approx(8 * 4096 / 0.15)
    assert json.loads((tmp_path / "run/run.json").read_text())["nodes"] == 128
