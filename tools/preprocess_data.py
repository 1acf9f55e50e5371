"""Tokenize JSON lines or plain text into Megatron's `.bin` and `.idx` files.

The flags are those of Megatron-LM's tool of this name. Beyond them: `--input` takes several files
and globs, JSONL or plain text, gzipped or not; the output is written aside and renamed when whole,
and its bytes do not depend on --workers or --partitions.

    tools/preprocess_data.py --input 'corpus/*.jsonl' --output-prefix data/corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer --workers 16

writes data/corpus_text_document.bin and .idx; `--data-path data/corpus_text_document` reads them.
"""

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron.efa.errors import EfaError
from megatron.efa.fork import verify_at_start

_UNUSABLE = ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")
"""Tokenizers for conversations and images, which do not encode plain text."""


def parser() -> argparse.ArgumentParser:
    """Return the parser; the tokenizer's flags are those of `pretrain_gpt.py`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about training: which kernels are missing here
        from megatron.training.arguments import _add_tokenizer_args

    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_tokenizer_args(p)
    group = p.add_argument_group("input data")
    group.add_argument("--input", nargs="+", required=True, help="files or globs")
    group.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="auto: .txt .text .md .rst are text, everything else is JSON lines (before a .gz)",
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys to encode")
    group.add_argument(
        "--split-documents",
        choices=("file", "paragraph", "line"),
        default="file",
        help="what a document is in plain text: a file, what stands between blank lines, a line",
    )
    group.add_argument("--split-sentences", action="store_true", help="refused: see the message")
    group.add_argument("--keep-newlines", action="store_true", help="newlines are always kept")
    group = p.add_argument_group("tokenization process")
    group.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document id"
    )
    group = p.add_argument_group("output data")
    group.add_argument("--output-prefix", type=_prefix, required=True, help="path without suffix")
    group = p.add_argument_group("runtime")
    cores = len(os.sched_getaffinity(0))
    group.add_argument("--workers", type=int, default=cores, help="processes (default: the cores)")
    group.add_argument(
        "--partitions", type=int, default=1, help="writers, each with workers/partitions workers"
    )
    group.add_argument(
        "--keep-sequential-samples", action="store_true", help="documents always keep their order"
    )
    group.add_argument(
        "--log-interval", type=int, default=1000, help="documents between lines, without a terminal"
    )
    group.add_argument(
        "--find-optimal-num-workers", action="store_true", help="measure, and write nothing"
    )
    group.add_argument("--workers-to-check", nargs="+", type=int, default=[16, 32, 64])
    group.add_argument("--max-documents", type=int, default=100_000, help="documents to measure on")
    return p


def _prefix(text: str) -> Path:
    if text.endswith(("/", "/.", "/..")) or text in ("", ".", ".."):
        raise argparse.ArgumentTypeError(
            f"'{text}' is a folder: add what the files' names shall begin with"
        )
    return Path(text)


def check(args: argparse.Namespace) -> None:
    """Raise EfaError for flags that cannot be obeyed."""
    if args.split_sentences:
        raise EfaError(
            "--split-sentences is for BERT-like models and is not offered: split beforehand and "
            "give each document as a JSON list of texts, which are kept as separate sequences"
        )
    if args.tokenizer_type is None or args.tokenizer_type in _UNUSABLE:
        raise EfaError(
            f"--tokenizer-type {args.tokenizer_type or 'is missing'}: name a text tokenizer, for "
            "instance HuggingFaceTokenizer with --tokenizer-model"
        )
    for name in ("workers", "partitions", "log_interval", "max_documents"):
        if getattr(args, name) < 1:
            raise EfaError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1")
    for key in args.json_keys:
        if args.json_keys.count(key) > 1:
            raise EfaError(f"--json-keys names '{key}' twice: each key has files of its own")
        if "/" in key:
            raise EfaError(
                f"--json-keys {key}: the key becomes part of a file's name, which cannot hold a "
                "slash: rename it in the input"
            )
    if min(args.workers_to_check) < 1:
        raise EfaError("--workers-to-check holds a number less than 1")
    if args.workers % args.partitions:
        raise EfaError(
            f"--workers {args.workers} is not divisible by --partitions {args.partitions}"
        )


def tokenizer(args: argparse.Namespace) -> Any:
    """Build the tokenizer that the flags name; raises EfaError."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    args.pad_vocab_size = False  # the model's padding is training's business
    try:
        built = build_tokenizer(args)
        eod = built.eod if args.append_eod else 0
    except Exception as error:  # each library has its own
        raise EfaError(
            f"cannot build {args.tokenizer_type} from {args.tokenizer_model or args.vocab_file}: "
            f"{' '.join(str(error).split()) or type(error).__name__}"
        ) from error
    if eod is None or not 0 <= eod < built.vocab_size:
        raise EfaError(f"--append-eod: {args.tokenizer_type} has no end-of-document token")
    return built


class Progress:
    """A bar on a terminal; elsewhere a line every `interval` documents."""

    def __init__(self, size: int, interval: int) -> None:
        tqdm.monitor_interval = 0  # no thread of its own: the workers are forked
        self.bar = tqdm(total=size, unit="B", unit_scale=True, disable=None, file=sys.stderr)
        self.interval, self.documents, self.bytes, self.start = interval, 0, 0, time.monotonic()

    def __call__(self, done: Any) -> None:
        before = self.documents // self.interval
        self.documents += done.documents
        self.bytes += done.bytes
        self.bar.set_postfix_str(f"{self.documents} documents", refresh=False)
        self.bar.update(done.bytes)
        if self.bar.disable and self.documents // self.interval > before:
            seconds = max(1e-9, time.monotonic() - self.start)
            print(
                f"{self.documents} documents ({self.documents / seconds:.0f} documents/s, "
                f"{self.bytes / seconds / 1e6:.2f} MB/s)",
                file=sys.stderr,
                flush=True,
            )


def measure(encoder: Any, sources: Sequence[Any], args: argparse.Namespace) -> None:
    """Print how fast each number of workers encodes the first `--max-documents` documents."""
    from megatron.efa.preprocess.documents import chunks
    from megatron.efa.preprocess.encode import encode

    rates = {}
    for workers in args.workers_to_check:
        start, count = time.monotonic(), 0
        # Small chunks, so that every worker has some of a small sample.
        encoded = encode(encoder, chunks(sources, size=1 << 16), workers)
        for part in encoded:
            count += len(part.lengths[0])
            if count >= args.max_documents:
                break
        encoded.close()
        rates[workers] = count / (time.monotonic() - start)
        print(f"{workers} workers: {rates[workers]:.0f} documents/s", flush=True)
    print(f"fastest: --workers {max(rates, key=rates.__getitem__)}")


def run(args: argparse.Namespace) -> None:
    """Do what the flags say; raises EfaError."""
    from megatron.efa.preprocess.build import build, prefixes
    from megatron.efa.preprocess.documents import find
    from megatron.efa.preprocess.encode import Encoder

    check(args)
    sources = find(args.input, args.input_format)
    if args.json_keys != ["text"] and any(source.format == "text" for source in sources):
        raise EfaError("--json-keys is for JSON lines, and --input names plain text")
    encoder = Encoder(tokenizer(args), args.json_keys, args.split_documents, args.append_eod)
    if args.find_optimal_num_workers:
        return measure(encoder, sources, args)
    progress = Progress(sum(source.size for source in sources), args.log_interval)
    with progress.bar:
        counts = build(
            encoder, sources, args.output_prefix, args.workers, args.partitions, progress
        )
    empty = f" ({counts.empty} empty)" if counts.empty else ""
    names = ", ".join(str(name) for name in prefixes(args.output_prefix, args.json_keys))
    print(f"{counts.documents} documents{empty}, {counts.tokens} tokens: {names}.bin and .idx")
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; an error is one line on stderr, exit code 2."""
    try:
        verify_at_start()
        run(parser().parse_args(argv))
    except EfaError as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("preprocess_data: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # An interruption must unwind, so that what was begun is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
