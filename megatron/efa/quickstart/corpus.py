"""Text that is on every machine with CPython: the language reference that `help()` shows.

About 400 kB of English and Python in some 70 documents. The topics quote one another at length, so
a passage is kept only where it comes first: what is held out then occurs nowhere in training.
"""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.efa.errors import EfaError

END_OF_DOCUMENT = "<|endoftext|>"
_QUOTE = 40  # characters from which a passage that comes again counts as quoted
_SHORTEST = 200  # characters of a document worth keeping
_HELD_OUT = 0.1  # of all characters
_LARGEST_HELD_OUT = 0.05  # of all characters, in one document: keep the long ones for training
_SEED = 1234


@dataclass(frozen=True)
class Document:
    """One topic of the reference."""

    topic: str
    text: str


def topics() -> dict[str, str]:
    """Return Python's help topics by name; raises EfaError where Python came without them."""
    try:
        from pydoc_data.topics import topics as found
    except ImportError as error:
        raise EfaError(
            "this Python has no module pydoc_data, whose text the quickstart trains on: install "
            "Python's whole standard library (Debian and Ubuntu: libpython3-stdlib)"
        ) from error
    return found


def documents(texts: dict[str, str]) -> list[Document]:
    """Return the topics in order of their names, without what an earlier one has already said."""
    seen: set[str] = set()
    found = []
    for topic in sorted(texts):
        kept = []
        for passage in re.split(r"\n{2,}", texts[topic].strip("\n")):
            words = " ".join(passage.split())
            if len(words) >= _QUOTE:
                if words in seen:
                    continue
                seen.add(words)
            kept.append(passage)
        text = "\n\n".join(kept)
        if len(text) >= _SHORTEST:
            found.append(Document(topic, text))
    return found


def split(found: list[Document]) -> tuple[list[Document], list[Document]]:
    """Shuffle and divide documents into training and held out, the same way every time."""
    shuffled = random.Random(_SEED).sample(found, len(found))
    total = sum(len(document.text) for document in found)
    train, held_out, taken = [], [], 0
    for document in shuffled:
        size = len(document.text)
        if size <= _LARGEST_HELD_OUT * total and taken + size <= _HELD_OUT * total:
            held_out.append(document)
            taken += size
        else:
            train.append(document)
    if not train or not held_out:
        raise EfaError(f"{len(found)} documents are too few to hold some out for validation")
    return train, held_out


def write_jsonl(path: Path, documents: list[Document]) -> None:
    """Write one JSON object a line, with keys `text` and `topic`."""
    lines = [json.dumps({"text": d.text, "topic": d.topic}) + "\n" for d in documents]
    path.write_text("".join(lines), encoding="utf-8")


def train_tokenizer(documents: list[Document], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE of `vocabulary` tokens and save it as a Hugging Face tokenizer.

    Any text survives the round trip, since every byte is a token. Id 0 ends a document.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([document.text for document in documents], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
