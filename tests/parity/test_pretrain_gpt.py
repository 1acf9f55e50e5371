"""`pretrain_gpt.py` trains: as the least entry point does, by YAML as by flags, on real data."""

import functools
import os
import re
import shlex
import subprocess
import sys

import pytest

from megatron.efa.emulate.job import free_port
from tests.parity.harness import MLA, MODEL, MOE, ROOT, TRAINING

STEPS = 3


LAYOUTS = {
    "tensor parallel": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "interleaved pipeline with MTP": (
        2,
        shlex.split(
            "--pipeline-model-parallel-size 2 --num-layers 4 --mtp-num-layers 1 "
            "--num-virtual-stages-per-pipeline-rank 2"
        ),
    ),
    "experts, MLA, MTP": (2, [*MOE, *MLA, *shlex.split("--expert-model-parallel-size 2")]),
}


@pytest.mark.parametrize(("ranks", "flags"), LAYOUTS.values(), ids=LAYOUTS)
def test_flags_train_bit_for_bit_as_with_the_least_entry_point(fork, ours, ranks, flags):
    reference = fork.run(ranks, flags, STEPS).checked()
    assert ours.run(ranks, flags, STEPS).checked().bits == reference.bits


MOCK_YAML_AS_FLAGS = shlex.split(
    "--num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --swiglu "
    "--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 "
    "--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --rope-type rope --num-experts 8 "
    "--moe-layer-freq [0]+[1]*2 --moe-ffn-hidden-size 64 --moe-router-topk 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-router-dtype fp32 --moe-shared-expert-intermediate-size 64 "
    "--moe-token-dispatcher-type alltoall --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 1023 --seq-length 64 --split 98,1,1 --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 "
    "--clip-grad 1 --log-interval 1 --eval-interval 20 --eval-iters 1 --use-distributed-optimizer "
    "--distributed-backend gloo --transformer-impl local --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm "
    "--expert-model-parallel-size 2 --train-iters 3"
)


def test_yaml_trains_bit_for_bit_as_the_flags_it_stands_for(ours):
    words = ["cluster=cpu", "parallel.expert_model_parallel_size=2", "train.train_iters=3"]
    by_yaml = ours.start(2, ["--config", str(ROOT / "examples/mock.yaml"), *words]).checked()
    assert by_yaml.bits == ours.start(2, MOCK_YAML_AS_FLAGS).checked().bits


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two indexed data sets, each of one token repeated: 7 and 9."""
    import numpy
    import torch

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder = tmp_path_factory.mktemp("corpora")
    for token in (7, 9):
        builder = IndexedDatasetBuilder(f"{folder}/{token}.bin", dtype=numpy.uint16)
        for _ in range(40):
            builder.add_document(torch.full((50,), token), [50])
        builder.finalize(f"{folder}/{token}.idx")
    return str(folder / "7"), str(folder / "9")


REAL_DATA = [*MODEL, *TRAINING]
REAL_DATA.remove("--mock-data")


def losses_after_training(run):
    found = re.findall(r"on (validation|test) set \| lm loss value: (\S+)", run.logs[-1])
    return {name: float(loss) for name, loss in found}


def test_each_split_reads_its_own_data(ours, corpora):
    seven, nine = corpora
    data = ["--train-data-path", seven, "--valid-data-path", seven, "--test-data-path", nine]
    flags = [*REAL_DATA, *data, *shlex.split("--train-iters 12 --lr 1e-2 --eval-iters 1")]
    losses = losses_after_training(ours.start(1, flags).checked())
    assert losses["validation"] < 0.5
    assert losses["test"] > 4


def test_a_blend_is_the_same_by_yaml_and_by_file(ours, corpora, tmp_path):
    seven, nine = corpora
    (tmp_path / "blend.txt").write_text(f"0.3 {seven} 0.7 {nine}\n")
    (tmp_path / "blend.yaml").write_text(f"data:\n  data_path: [0.3, {seven}, 0.7, {nine}]\n")
    flags = [*REAL_DATA, "--split", "100,0,0", "--train-iters", str(STEPS)]
    by_file = ours.start(2, [*flags, "--data-args-path", str(tmp_path / "blend.txt")]).checked()
    by_yaml = ours.start(2, [*flags, "--config", str(tmp_path / "blend.yaml")]).checked()
    assert by_yaml.bits == by_file.bits
    alone = ours.start(2, [*flags, "--data-path", seven]).checked()
    assert alone.bits != by_file.bits


def test_the_mean_over_tokens_is_the_mean_over_microbatches_of_equal_size(ours):
    by_microbatch = ours.run(2, [], STEPS).checked()
    by_token = ours.run(2, ["--calculate-per-token-loss"], STEPS).checked()
    assert by_token.losses == pytest.approx(by_microbatch.losses, rel=1e-5)
    assert by_token.grad_norms == pytest.approx(by_microbatch.grad_norms, rel=1e-4)


def test_the_rerun_state_machine_watches_the_loss(ours, tmp_path):
    flags = [f for f in [*MODEL, *TRAINING] if f != "--no-check-for-nan-in-loss-and-grad"]
    faults = "--error-injection-rate 1 --error-injection-type persistent_error --train-iters 4"
    save = ["--save", str(tmp_path), "--save-interval", "9"]  # where it leaves the state to rerun
    run = ours.start(1, [*flags, *shlex.split(faults), *save])
    assert not run.ok
    assert "found NaN in local forward loss calculation" in run.logs[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num-layers", "5", "--pipeline-model-parallel-size", "2"], "should be divisible by"),
        (["--data-path", "a"], "A single data source must be provided"),
        (["--load", "x", "--ckpt-convert-format", "torch"], "this does not hold: args.ckpt_conv"),
        (["--eval-interval", "0"], "--eval-interval is missing"),
        (["--sft"], "--sft packs documents into one sequence"),
        (
            ["--transformer-impl", "transformer_engine"],
            "Transformer Engine, which is not installed",
        ),
        (["parallel.context_parallel_size=2"], "--context-parallel-size above 1 needs"),
        (["model.moe_grouped_gemm=true"], "--moe-grouped-gemm needs"),
        (["--checkpoint-activations"], "Megatron refuses these arguments"),
        (["train.lr=3"], "lr is set twice, by --lr on the command line and by train.lr"),
        (["--nm-layers", "3"], "there is no flag --nm-layers; did you mean --num-layers?"),
        (["--num-layers", "x"], "argument --num-layers: invalid int value: 'x'"),
        (["--attention-backend", "x"], "argument --attention-backend: invalid value 'x'"),
        (["--yaml-cfg", "x.yaml"], "--yaml-cfg no longer works in Megatron"),
        (["trian.lr=3"], "'trian.lr=3' is neither a flag, nor"),
    ],
)
def test_a_bad_argument_is_one_line_of_rank_0_and_exit_code_2(ours, words, sentence):
    run = ours.run(2, words)
    assert run.codes[0] == 2
    lines = [line for line in run.logs[0].splitlines() if line.startswith("entry.py: ")]
    assert len(lines) == 1
    assert sentence in lines[0]
    assert "entry.py: " not in run.logs[1]
    assert not any("Traceback" in log for log in run.logs)


def test_missing_data_are_told_before_any_group_is_made(ours, tmp_path):
    run = ours.start(2, [*REAL_DATA, "--train-iters", "1", "--data-path", "0.5", "a", "0.5", "b"])
    assert run.codes[0] == 2
    assert "entry.py: there is no file a.idx for the data path a" in run.logs[0]
    (tmp_path / "blend").write_text("a")
    run = ours.start(1, [*REAL_DATA, "--train-iters", "1", "--data-args-path", f"{tmp_path}/blend"])
    assert run.codes == [2]
    assert "entry.py: split must be provided when blend is not None" in run.logs[0]


def test_plain_flags_of_an_upstream_user_train_without_torchrun():
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data "
        "--max-position-embeddings 64 --micro-batch-size 2 --train-iters 2 --lr 1e-3 --vocab-size "
        "128 --tokenizer-type NullTokenizer --distributed-backend gloo --log-interval 1 "
        "--eval-iters 1 --eval-interval 10 --transformer-impl local"
    )
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in launched}
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags.split()]
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=env, timeout=300)
    done = run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"iteration +2/ +2 ", done.stdout)
    refused = run([*command, "--lr-warmup-iters", "5", "--lr-decay-iters", "4"])
    assert refused.returncode == 2
    assert "lr_warmup_steps = 10 and lr_decay_steps = 8" in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr


def torchrun(*words, timeout=400):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), str(ROOT / "pretrain_gpt.py"), *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout)


def test_torchrun_trains_a_config():
    example = str(ROOT / "examples/mock.yaml")
    done = torchrun("--config", example, "cluster=cpu", "model=gpt_tiny", "train.train_iters=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"iteration +2/ +2 ", done.stdout)
    assert "validation loss at iteration 2 on test set" in done.stdout


def test_torchrun_shows_a_yaml_error_once(tmp_path):
    (tmp_path / "bad.yaml").write_text("model: [\n")
    done = torchrun("--config", str(tmp_path / "bad.yaml"))
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("pretrain_gpt.py: ")]
    assert len(ours) == 1
    assert "bad.yaml:2: not valid YAML" in ours[0]
