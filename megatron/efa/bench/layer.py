"""`megatron-efa bench layer`: one rank's expert layer, how near its matrix products are to peak.

A layer of E local experts (SwiGLU, grouped matrix products of PyTorch, bf16) runs forward and
backward on one device, its rows expanded and reduced by upstream's dispatcher or by ours, in turns.
Beside it: the grouped products alone, and a dense product, which is the peak here.

Shapes: T tokens, H hidden, F of an expert, k experts a token, M = T * k rows.
"""

import argparse
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.efa import aside
from megatron.efa.bench import dispatchers, report, statistics
from megatron.efa.errors import EfaError

Weights = tuple[torch.Tensor, torch.Tensor]
"""[E, H, 2F] and [E, F, H]."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa bench layer`; sizes default to DeepSeek-V3's."""
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--ffn", type=int, default=2048, help="of an expert")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--experts", default="8,16,32", help="local experts, several")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    """Measure and print; raises EfaError without a GPU or with experts that rows do not fill."""
    if not torch.cuda.is_available():
        raise EfaError("bench layer measures a CUDA device: this machine lacks one")
    if not hasattr(torch.nn.functional, "grouped_mm"):
        raise EfaError(f"PyTorch {torch.__version__} has no grouped_mm: bench layer needs 2.10")
    counts = [int(word) for word in args.experts.split(",") if word.isdecimal()]
    for experts in counts:
        # A product over each expert's rows wants their addresses on 16 bytes.
        if args.topk > experts or args.tokens * args.topk % (8 * experts):
            raise EfaError(
                f"{args.tokens} tokens x {args.topk} do not give {experts} experts a multiple of 8 "
                "rows each: change --tokens, --topk or --experts"
            )
    if not counts or args.rounds < 1:
        raise EfaError(f"--experts {args.experts} --rounds {args.rounds}: give numbers like 8,16")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", f"file://{folder}/store", rank=0, world_size=1)
        pg = dispatchers.groups()
        peak = None
        records = []
        for experts in counts:
            case = Case(args, experts, pg)
            peak = peak or case.dense_rate()
            records += case.measure(args.rounds, peak)
        dist.destroy_process_group()
    print(f"peak, by a dense product: {peak / 1e12:.0f} TFLOP/s")
    print(report.table(
        ["experts", "what", "ms", "quartiles", "TFLOP/s", "of peak"],
        [[r["experts"], r["what"], f"{r['ms']:.2f}", f"{r['ms_low']:.2f} to {r['ms_high']:.2f}",
          f"{r['tflops']:.0f}", f"{r['of_peak']:.0%}"] for r in records],
    ))  # fmt: skip
    if args.json is not None:
        content = {
            "command": shlex.join(["megatron-efa", *sys.argv[1:]]),
            "date": time.strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "peak_tflops": peak / 1e12,
            "records": records,
        }
        with aside.beside(args.json) as made:
            (made / "out").write_text(json.dumps(content, indent=1) + "\n")
            (made / "out").replace(args.json)
    return 0


class Case:
    """A layer of `experts` local experts, and what it works on."""

    def __init__(self, args: argparse.Namespace, experts: int, pg: Any) -> None:
        self.args, self.experts = args, experts
        self.device = torch.device("cuda")
        random = torch.Generator().manual_seed(1)
        tokens, hidden, topk = args.tokens, args.hidden, args.topk
        self.rows = tokens * topk
        # Each expert as many rows, at random, a token never twice the same.
        first = torch.randperm(tokens, generator=random) % experts
        chosen = (first.unsqueeze(1) + torch.arange(topk)) % experts
        self.map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
        self.map = self.map.to(self.device)
        self.probs = (self.map / topk).float().requires_grad_()
        self.hidden = self._random(tokens, 1, hidden)
        self.weights = (
            self._random(experts, hidden, 2 * args.ffn, scale=hidden**-0.5),
            self._random(experts, args.ffn, hidden, scale=args.ffn**-0.5),
        )
        self.grad = self._random(tokens, 1, hidden).detach()
        self.dispatchers = {
            name: dispatchers.build(
                dispatchers.Arm(kind), experts, topk, hidden, torch.bfloat16, pg
            )
            for name, kind in (("layer, upstream's rows", "alltoall"),
                               ("layer, our rows", dispatchers.OURS))
        }  # fmt: skip
        # Of the products of one expert row: H x 2F and F x H, forward once and backward twice.
        self.flops = 3 * 2 * self.rows * 3 * hidden * args.ffn

    def _random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.randn(shape, device=self.device, dtype=torch.bfloat16) * scale
        return made.requires_grad_()

    def measure(self, rounds: int, peak: float) -> list[dict[str, Any]]:
        """A record for the products alone and for each dispatcher's layer."""
        counts = torch.full((self.experts,), self.rows // self.experts)
        rows = self._random(self.rows, self.args.hidden)
        grad = self._random(self.rows, self.args.hidden).detach()
        ones = torch.ones(self.rows, device=self.device)

        def products() -> None:
            self._clear(rows)
            experts_of(rows, counts, ones, self.weights).backward(grad)

        def layer(name: str) -> Callable[[], None]:
            def once() -> None:
                self._clear()
                self.forward(self.dispatchers[name]).backward(self.grad)

            return once

        runs = {"grouped products alone": products}
        runs |= {name: layer(name) for name in self.dispatchers}
        self._agree()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(-3, rounds):
            for name, call in runs.items():
                seconds = self._seconds(call)
                if round_ >= 0:
                    times[name].append(seconds)
        records = []
        for name, seconds in times.items():
            ms = statistics.summary(seconds).scaled(1e3)
            rate = self.flops / (ms.median / 1e3)
            records.append(
                {
                    "experts": self.experts,
                    "what": name,
                    **{k: getattr(self.args, k) for k in ("tokens", "hidden", "ffn", "topk")},
                    **{"ms": ms.median, "ms_low": ms.low, "ms_high": ms.high},
                    **{"rounds": rounds, "tflops": rate / 1e12, "of_peak": rate / peak},
                }
            )
        return records

    def forward(self, dispatcher: Any) -> torch.Tensor:
        """The layer after its router: [T, 1, H] -> [T, 1, H]."""
        rows, probs = dispatcher.dispatch_preprocess(self.hidden, self.map, self.probs)
        rows, probs = dispatcher.token_dispatch(rows, probs)
        rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
        rows = dispatcher.combine_preprocess(experts_of(rows, counts, probs, self.weights))
        return dispatcher.combine_postprocess(dispatcher.token_combine(rows))

    def _agree(self) -> None:
        outputs = [self.forward(each).float() for each in self.dispatchers.values()]
        unit = outputs[0].abs().max() * torch.finfo(torch.bfloat16).eps
        if not float((outputs[0] - outputs[1]).abs().max() / unit) < 8:
            raise EfaError("the two layers' outputs differ by more than rounding: one is wrong")

    def _clear(self, *more: torch.Tensor) -> None:
        for leaf in (self.hidden, self.probs, *self.weights, *more):
            leaf.grad = None

    def dense_rate(self, size: int = 8192) -> float:
        """FLOP/s of a dense bf16 product of `size` cubed: the best of several."""
        a, b = (self._random(size, size).detach() for _ in range(2))
        return 2 * size**3 / min(self._seconds(lambda: a @ b) for _ in range(20))

    def _seconds(self, call: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3


def experts_of(
    rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, weights: Weights
) -> torch.Tensor:
    """SwiGLU experts: rows [M, H] by expert, `counts` int64 [E], probs [M] -> [M, H]."""
    ends = counts.to(rows.device).cumsum(0).to(torch.int32)
    both = torch.nn.functional.grouped_mm(rows, weights[0], offs=ends)
    gate, up = both.chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up * probs.to(rows.dtype).unsqueeze(1)
    return torch.nn.functional.grouped_mm(inner, weights[1], offs=ends)
