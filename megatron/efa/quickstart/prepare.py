"""From the corpus to the token files that training reads; done again only if its inputs changed."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from megatron.efa import aside
from megatron.efa.emulate import kernel
from megatron.efa.errors import EfaError
from megatron.efa.quickstart import corpus

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 1024

Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """The prepared folder: tokenizer, and token files as Megatron's data paths name them."""

    folder: Path

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def train(self) -> Path:
        return self.folder / "train_text_document"

    @property
    def valid(self) -> Path:
        return self.folder / "valid_text_document"

    def fingerprint(self) -> str | None:
        """Return what the folder was made from, or None if it is not whole."""
        try:
            return json.loads((self.folder / "prepared.json").read_text())["fingerprint"]
        except (OSError, ValueError, KeyError):
            return None


def short(path: Path) -> str:
    """Return a path as one types it in the root of the repository."""
    path = path.absolute()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def fingerprint(texts: dict[str, str]) -> str:
    """Return a hash of all that decides the prepared files: the text, our code, the tokenizer's."""
    digest = hashlib.sha256()
    for module in (corpus.__file__, __file__):
        digest.update(Path(module).read_bytes())
    digest.update(json.dumps([texts, version("tokenizers"), version("transformers")]).encode())
    return digest.hexdigest()


def prepare(folder: Path, log: Path, say: Say) -> Data:
    """Return the prepared data in `folder`, made anew unless it is there from the same inputs.

    Output of the tools goes to `log`. Raises EfaError; a folder that was there stays until the new
    one is whole.
    """
    texts = corpus.topics()
    data, wanted = Data(folder), fingerprint(texts)
    if data.fingerprint() == wanted:
        say(f"data: {short(folder)} is there already")
        return data
    with aside.beside(folder) as scratch:
        _make(Data(scratch), texts, log, say)
        (scratch / "prepared.json").write_text(json.dumps({"fingerprint": wanted}) + "\n")
        scratch.chmod(0o755)
        with aside.alone(folder.parent):
            if data.fingerprint() != wanted:  # else another run has just put the same there
                shutil.rmtree(folder, ignore_errors=True)
                scratch.replace(folder)
    return data


def _make(data: Data, texts: dict[str, str], log: Path, say: Say) -> None:
    train, held_out = corpus.split(corpus.documents(texts))
    say(f"data: {len(train)} help topics of Python for training, {len(held_out)} held out")
    corpus.train_tokenizer(train, VOCABULARY, data.tokenizer)
    say(f"data: byte-level BPE of {VOCABULARY} tokens trained")
    parts = {data.train: train, data.valid: held_out}
    running: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as output:
        try:
            for prefix, documents in parts.items():
                name = prefix.name.removesuffix("_text_document")
                corpus.write_jsonl(data.folder / f"{name}.jsonl", documents)
                command = _preprocess(data, name)
                running.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        preexec_fn=partial(kernel.die_with_parent, signal.SIGTERM),
                    )
                )
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.terminate()  # does nothing to one that has ended
                process.wait()
    if any(codes):
        raise EfaError(
            f"tools/preprocess_data.py failed with exit code {max(codes)}: see {short(log)}"
        )
    say("data: tokenized by tools/preprocess_data.py")


def _preprocess(data: Data, name: str) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "tools" / "preprocess_data.py"),
        *("--input", str(data.folder / f"{name}.jsonl")),
        *("--output-prefix", str(data.folder / name)),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data.tokenizer)),
        *("--append-eod", "--workers", "1"),
    ]
