"""Training runs of a few steps on N gloo ranks, with exact losses and gradient norms."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.efa.emulate.job import free_port

ROOT = Path(__file__).resolve().parents[2]

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --swiglu --disable-bias-linear --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --no-persist-layer-norm "
    "--attention-dropout 0 --hidden-dropout 0 --no-rope-fusion --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --transformer-impl local --attention-backend unfused"
)
MOE = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 "
    "--moe-token-dispatcher-type alltoall"
)
MLA = shlex.split(
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12"
)
TRAINING = shlex.split(
    "--distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 "
    "--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 0 --weight-decay 0.1 --clip-grad 1 "
    "--seed 1234 --log-interval 1 --eval-iters 0 --eval-interval 1000 "
    "--num-workers 0 --lr-decay-iters 20 --distributed-timeout-minutes 1 "
    "--no-check-for-nan-in-loss-and-grad"
)


@dataclass
class Run:
    """What a run left behind. `steps[i]` is the i-th step as the last stage saw it."""

    codes: list
    steps: list
    logs: list

    @property
    def ok(self):
        return not any(self.codes)

    @property
    def losses(self):
        return [float.fromhex(step["losses"]["lm loss"]) for step in self.steps]

    @property
    def grad_norms(self):
        return [float.fromhex(step["grad_norm"]) for step in self.steps]

    @property
    def bits(self):
        """Losses and gradient norms exactly: equal only if every bit is."""
        return [(step["losses"], step["grad_norm"]) for step in self.steps]

    def tail(self, lines=25):
        return "\n".join(
            f"--- rank {rank}, exit {code}\n" + "\n".join(log.splitlines()[-lines:])
            for rank, (code, log) in enumerate(zip(self.codes, self.logs, strict=True))
            if code
        )

    def checked(self):
        assert self.ok, self.tail()
        assert self.steps, "the run trained no step"
        return self


class Trainer:
    """Runs jobs on one tree of Megatron: ours (`plain` None), or upstream's at `plain`."""

    def __init__(self, scratch, plain=None):
        self.scratch, self.count, self.done = Path(scratch), 0, {}
        path = [str(plain), str(ROOT)] if plain else [str(ROOT)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.parity.zygote", *(["--plain"] if plain else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.scratch,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout.readline() == "ready\n", "the trainer did not start"

    def run(self, ranks, argv, steps=4, timeout=300, per_node=None, hosts=None):
        """Train `steps` steps on `ranks` ranks with the Megatron flags `argv`.

        The ranks think themselves on nodes of `per_node` (None: on one node), which are `hosts`
        ([name, path] each) where those are given. A run that was made already is not made again,
        unless it reads or writes a checkpoint.
        """
        key = (ranks, *argv, steps, per_node, str(hosts))
        if not {"--save", "--load"} & set(argv) and key in self.done:
            return self.done[key]
        self.done[key] = self._run(ranks, argv, steps, timeout, per_node, hosts)
        return self.done[key]

    def _run(self, ranks, argv, steps, timeout, per_node, hosts):
        self.count += 1
        out = self.scratch / f"run{self.count}"
        argv = [*MODEL, *TRAINING, "--train-iters", str(steps), *argv]
        job = {"ranks": ranks, "argv": argv, "port": free_port(), "out": str(out)}
        job["per_node"] = per_node or ranks
        if hosts:
            job["hosts"] = hosts
        self.process.stdin.write(json.dumps(job | {"timeout": timeout}) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        last = out / f"rank{ranks - 1}.json"
        logs = [(out / f"rank{rank}.log").read_text() for rank in range(ranks)]
        return Run(codes, json.loads(last.read_text()) if last.exists() else [], logs)

    def close(self):
        self.process.stdin.close()
        self.process.wait(30)


class OurTrainer(Trainer):
    """The same, running `pretrain_gpt.py`."""

    def __init__(self, scratch):
        self.scratch, self.count, self.done = scratch, 0, {}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.parity.ours"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=scratch,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout.readline() == "ready\n", "the trainer did not start"

    def start(self, ranks, argv, timeout=240):
        """Run with just these words: flags, `--config`, overrides."""
        self.count += 1
        out = self.scratch / f"run{self.count}"
        job = {"ranks": ranks, "argv": argv, "port": free_port(), "out": str(out)}
        self.process.stdin.write(json.dumps(job | {"timeout": timeout}) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        logs = [(out / f"rank{rank}.log").read_text() for rank in range(ranks)]
        last = out / f"rank{ranks - 1}.json"
        return Run(codes, json.loads(last.read_text()) if last.exists() else [], logs)
