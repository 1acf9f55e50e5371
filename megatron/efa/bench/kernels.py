"""`megatron-efa bench kernels`: the expert path's row kernels against copies and upstream's code.

Every operation of one rank's dispatch and combine is timed alone (median of many runs, the cache
flushed between them) and set beside the time that copying as many bytes takes on the same device:
the bytes read once plus the bytes written once. Upstream's permutation of the same routing, which
moves a row per chosen expert, is timed beside it.
"""

import argparse
import importlib.util
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.efa import aside
from megatron.efa.bench.expert_rows import Layer, Lists, RankWork, work_of_rank_0
from megatron.efa.errors import EfaError
from megatron.efa.expert import kernels
from megatron.efa.expert import lists as plain_lists
from megatron.efa.expert.rows import GROUP

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COPIED_BYTES = 2**30  # of the copy that measures bandwidth: 18 times the cache of an H200
BYTES_BESIDE = 64  # expert ids and probabilities in a message row: 8 choices of 4 + 4 bytes

Timed = tuple[str, int, Callable[[], object]]  # name, bytes that must move, what to run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `megatron-efa bench kernels`; the defaults are DeepSeek-V3's layer."""
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-upstream", action="store_true", help="leave upstream's code out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write FILE. Raises EfaError without a GPU."""
    if args.experts % (args.nodes * args.ranks_per_node):
        raise EfaError(
            f"--experts {args.experts} cannot be dealt to {args.nodes} x {args.ranks_per_node}"
            " ranks evenly: give a multiple"
        )
    if not 0 < args.topk <= args.experts:
        raise EfaError(f"--topk {args.topk} is not between 1 and --experts {args.experts}")
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        raise EfaError("bench kernels measures a CUDA device with Triton: this machine lacks one")
    layer = Layer(
        args.tokens, args.hidden, args.experts, args.topk, args.nodes, args.ranks_per_node
    )
    dtype = DTYPES[args.dtype]
    work = work_of_rank_0(layer, "cuda", args.seed)
    copy = _copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s read and written, {torch.cuda.get_device_name()}")
    groups: dict[str, Iterator[Timed]] = {
        "rows": _row_operations(work, layer.hidden, dtype),
        "rows, fp8 dispatch": _fp8_operations(work, layer.hidden, dtype),
        "lists": _list_operations(work, layer),
        "lists, plain PyTorch": _plain_list_operations(work),
    }
    if not args.no_upstream:
        groups["upstream"] = _upstream_operations(work, layer, dtype, fused=False)
        if importlib.util.find_spec("transformer_engine") is not None:
            groups["upstream, fused"] = _upstream_operations(work, layer, dtype, fused=True)
    records = [
        _record(group, name, count, _median_ms(call), copy)
        for group, operations in groups.items()
        for name, count, call in operations
    ]
    records += _totals(records, copy)
    _print(records)
    if args.json:
        _write(args.json, {**_machine(), "layer": vars(layer), "dtype": args.dtype}, copy, records)
    return 0


def _row_operations(work: RankWork, hidden: int, dtype: torch.dtype) -> Iterator[Timed]:
    """Pack and forward into message rows, expand into plain ones, and the sums of the combine."""
    row = hidden * dtype.itemsize
    for name, lists, packed in (
        ("pack for nodes", work.pack, True),
        ("forward to ranks", work.forward, True),
        ("expand to experts", work.expand, False),
    ):
        if not lists.copies:  # one node: nothing is packed
            continue
        src, out = _values(lists.rows, hidden, dtype), _values(lists.copies, hidden, dtype)
        if packed:
            out = _message_rows(lists.copies, row)[:, :row].view(dtype)
        _check(src, lists, out)
        yield (
            f"{name}: {lists.rows} to {lists.copies}",
            lists.bytes_moved(row, row),
            partial(kernels.spread, src, lists.offsets, lists.index, out),
        )
    for name, lists in (
        ("sum over experts", work.expand),
        ("sum over ranks", work.forward),
        ("sum over nodes", work.sum_nodes),
    ):
        src, out = _values(lists.copies, hidden, dtype), _values(lists.rows, hidden, dtype)
        yield (
            f"{name}: {lists.copies} to {lists.rows}",
            lists.bytes_moved(row, row),
            partial(kernels.collect, src, lists.offsets, lists.index, out),
        )


def _fp8_operations(work: RankWork, hidden: int, dtype: torch.dtype) -> Iterator[Timed]:
    """The dispatch with e4m3 on the wire: quantize when packing, forward bytes, expand to dtype."""
    row, fp8_row = hidden * dtype.itemsize, hidden + 4 * -(-hidden // GROUP)
    if hidden % 4:
        return  # the scales behind the values would not be aligned

    def message(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        whole = _message_rows(n, fp8_row)[:, :fp8_row]
        values, scales = whole[:, :hidden], whole[:, hidden:]
        return whole, values.view(torch.float8_e4m3fn), scales.view(torch.float32)

    lists = work.pack
    if lists.copies:
        plain, (_, out, scales) = _values(lists.rows, hidden, dtype), message(lists.copies)
        yield (
            "pack for nodes, quantizing",
            lists.bytes_moved(row, fp8_row),
            partial(kernels.spread_quantized, plain, lists.offsets, lists.index, out, scales),
        )
    lists = work.forward
    (src, *_), (out, *_) = message(lists.rows), message(lists.copies)
    yield (
        "forward to ranks, fp8 bytes",
        lists.bytes_moved(fp8_row, fp8_row),
        partial(kernels.spread, src, lists.offsets, lists.index, out),
    )
    lists = work.expand
    (_, src, scales), plain = message(lists.rows), _values(lists.copies, hidden, dtype)
    yield (
        "expand to experts, dequantizing",
        lists.bytes_moved(fp8_row, row),
        partial(kernels.spread_dequantized, src, scales, lists.offsets, lists.index, plain),
    )


def _list_operations(work: RankWork, layer: Layer) -> Iterator[Timed]:
    """Making the lists themselves, from the chosen experts on; bytes are too few to matter."""
    per_node = layer.experts // layer.nodes

    def of_tokens() -> object:
        nodes = work.chosen.view(-1, layer.nodes, per_node).any(2)
        return kernels.lists_of(nodes, layer.tokens * min(layer.nodes, layer.topk))

    yield "chosen experts to lists by node", 0, of_tokens
    for name, lists in (("rank", work.forward), ("local expert", work.expand)):
        yield f"lists by {name}", 0, partial(kernels.lists_of, lists.mask, lists.copies)


def _plain_list_operations(work: RankWork) -> Iterator[Timed]:
    """The same in plain PyTorch."""
    for name, lists in (("rank", work.forward), ("local expert", work.expand)):
        outs = (lists.offsets.clone(), lists.index.clone(), lists.counts.clone())
        yield f"lists by {name}", 0, partial(plain_lists.lists_of, lists.mask, *outs)


def _upstream_operations(
    work: RankWork, layer: Layer, dtype: torch.dtype, fused: bool
) -> Iterator[Timed]:
    """Upstream's permutation by expert, its second sorting by local expert, and both undone."""
    from megatron.core.transformer.moe import moe_utils

    row, copies = layer.hidden * dtype.itemsize, layer.tokens * layer.topk
    tokens = _values(layer.tokens, layer.hidden, dtype)
    permute = partial(moe_utils.permute, tokens, work.chosen, num_out_tokens=copies, fused=fused)
    permuted, _, index, *_ = permute()
    count = (layer.tokens + copies) * row
    yield f"permute: {layer.tokens} to {copies}", count, permute

    sizes = work.received if fused else work.received.cpu()  # where each variant wants them
    order = torch.arange(sizes.numel(), device=sizes.device)
    arrived = _values(int(sizes.sum()), layer.hidden, dtype)
    ranks, local = sizes.shape
    for name, chunks, place in (
        ("sort by local expert", sizes, order.view(ranks, local).t()),
        ("sort back by rank", sizes.t(), order.view(local, ranks).t()),
    ):
        yield (
            f"{name}: {len(arrived)}",
            2 * len(arrived) * row,
            partial(
                moe_utils.sort_chunks_by_idxs,
                arrived,
                chunks.reshape(-1),
                place.reshape(-1),
                fused=fused,
            ),
        )
    yield (
        f"unpermute: {copies} to {layer.tokens}",
        count,
        partial(
            moe_utils.unpermute,
            permuted,
            index,
            tokens.shape,
            routing_map=work.chosen,
            fused=fused,
        ),
    )


def _check(src: torch.Tensor, lists: Lists, out: torch.Tensor) -> None:
    """Every copy is there and is its row: the figures are of work that was done."""
    kernels.spread(src, lists.offsets, lists.index, out)
    back = torch.empty_like(src)
    kernels.collect(out, lists.offsets, lists.index, back)
    expected = src.float() * lists.offsets.diff()[:, None]
    if not torch.allclose(back.float(), expected, rtol=4 * torch.finfo(src.dtype).eps, atol=0):
        raise EfaError("bench kernels: rows that were spread and summed are not what they were")


def _values(n: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, hidden, device="cuda").to(dtype)


def _message_rows(n: int, row_bytes: int) -> torch.Tensor:
    step = row_bytes + BYTES_BESIDE
    shape = (n, step + -step % 16)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def _median_ms(call: Callable[[], object]) -> tuple[float, float, float]:
    """(median, 10 %, 90 %) of many runs with a cold cache, in ms."""
    from triton.testing import do_bench

    return tuple(do_bench(call, warmup=20, rep=120, quantiles=[0.5, 0.1, 0.9]))


def _copy_bandwidth() -> float:
    """Bytes a second of torch's device-to-device copy, read plus written."""
    src = torch.randint(-128, 127, (COPIED_BYTES,), dtype=torch.int8, device="cuda")
    out = torch.empty_like(src)
    return 2 * COPIED_BYTES / _median_ms(lambda: out.copy_(src))[0] * 1e3


def _record(
    group: str, name: str, count: int, ms: tuple[float, float, float], copy: float
) -> dict[str, Any]:
    record: dict[str, Any] = {"group": group, "operation": name, "bytes": count}
    record |= {"ms": ms[0], "ms_p10": ms[1], "ms_p90": ms[2]}
    return record | _against_copy(count, ms[0], copy)


def _against_copy(count: int, ms: float, copy: float) -> dict[str, float]:
    if not count:
        return {}
    rate = count / ms * 1e3
    return {"gb_per_s": rate / 1e9, "copy_share": rate / copy, "times_copy": copy / rate}


def _totals(records: list[dict[str, Any]], copy: float) -> list[dict[str, Any]]:
    totals = []
    for group in dict.fromkeys(record["group"] for record in records):
        members = [record for record in records if record["group"] == group]
        count, ms = (sum(record[key] for record in members) for key in ("bytes", "ms"))
        total = {"group": group, "operation": "all", "bytes": count, "ms": ms}
        totals.append(total | _against_copy(count, ms, copy))
    return totals


def _print(records: list[dict[str, Any]]) -> None:
    print(f"{'group':<20} {'operation':<46} {'MB':>7} {'ms':>8} {'GB/s':>6} {'x copy':>6}")
    for record in records:
        against = (
            f"{record['gb_per_s']:6.0f} {record['times_copy']:6.2f}" if record["bytes"] else ""
        )
        print(
            f"{record['group']:<20} {record['operation']:<46} {record['bytes'] / 1e6:7.1f}"
            f" {record['ms']:8.4f} {against}".rstrip()
        )


def _machine() -> dict[str, Any]:
    import triton

    words = sys.argv[1:]
    words = words[words.index("kernels") + 1 :] if "kernels" in words else words
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", __spec__.name, *words]),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "transformer_engine": importlib.util.find_spec("transformer_engine") is not None,
    }


def _write(path: Path, about: dict[str, Any], copy: float, records: list[dict[str, Any]]) -> None:
    content = {**about, "copy_gb_per_s": copy / 1e9, "records": records}
    try:
        with aside.beside(path) as scratch:
            made = scratch / path.name
            made.write_text(json.dumps(content, indent=1) + "\n")
            made.replace(path)
    except OSError as error:
        raise EfaError(f"--json {path} cannot be written: {error.strerror}") from error


def main(argv: list[str] | None = None) -> int:
    """`python -m megatron.efa.bench.kernels`, as `megatron-efa bench kernels`."""
    parser = argparse.ArgumentParser(prog="megatron-efa bench kernels", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except EfaError as error:
        print(f"megatron-efa: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
