"""Documents to token ids, in one process or several, in order."""

import ctypes
import multiprocessing
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.efa.errors import EfaError
from megatron.efa.preprocess.documents import Chunk, Split, documents

FORK = multiprocessing.get_context("fork")
"""Workers are forked: they have the tokenizer, and Megatron, without importing them again."""

_AHEAD = 3
"""Chunks in flight for each worker: enough to keep it busy, few enough to bound memory."""


@dataclass(frozen=True)
class Encoder:
    """What turns a document into ids; `tokenizer` is one of megatron.core's."""

    tokenizer: Any
    keys: Sequence[str]
    split: Split
    append_eod: bool

    def chunk(self, chunk: Chunk) -> "Encoded":
        """Encode all documents of a chunk; raises EfaError naming file and line."""
        ids: list[list[int]] = [[] for _ in self.keys]
        lengths: list[list[list[int]]] = [[] for _ in self.keys]
        for position, values in documents(chunk, self.keys, self.split):
            for k, value in enumerate(values):
                try:
                    sequences = self._sequences(value)
                except EfaError as error:
                    place = chunk.place(position)
                    raise EfaError(f"{place}: key '{self.keys[k]}': {error}") from error
                for sequence in sequences:
                    ids[k].extend(sequence)
                lengths[k].append([len(sequence) for sequence in sequences])
        return Encoded(chunk.size, [np.array(i, dtype=np.int32) for i in ids], lengths)

    def _sequences(self, value: object) -> list[list[int]]:
        """Return the ids of a text, or of each text in a list; empty sequences are left out."""
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if not isinstance(text, str):
                raise EfaError(
                    f"a {type(text).__name__}, where text or a list of texts is expected"
                )
            if not text.isascii() and (lone := re.search("[\ud800-\udfff]", text)):
                raise EfaError(
                    f"half a character, \\u{ord(lone[0]):x}, which no encoding can write: mend the "
                    "line"
                )
        try:
            sequences = [list(self.tokenizer.tokenize(text)) for text in texts]
        except Exception as error:  # each tokenizer library has its own
            raise EfaError(f"the tokenizer refuses the text ({error})") from error
        sequences = [sequence for sequence in sequences if sequence]
        vocabulary = self.tokenizer.vocab_size
        for sequence in sequences:
            if min(sequence) < 0 or max(sequence) >= vocabulary:
                bad = next(i for i in sequence if not 0 <= i < vocabulary)
                raise EfaError(f"id {bad} is outside the tokenizer's vocabulary of {vocabulary}")
        if sequences and self.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        return sequences


@dataclass(frozen=True)
class Encoded:
    """A chunk's ids under each key, and how long its documents' sequences are."""

    size: int  # bytes read
    ids: list[np.ndarray]  # [key]: int32 [tokens]
    lengths: list[list[list[int]]]  # [key][document][sequence]


_encoder: Encoder | None = None


def _adopt(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _work(chunk: Chunk) -> Encoded:
    assert _encoder is not None
    return _encoder.chunk(chunk)


_STOPPING = {signal.SIGINT, signal.SIGTERM}
_PR_SET_PDEATHSIG = 1


def pool(processes: int, initializer: Callable[..., None], *arguments: Any) -> ProcessPoolExecutor:
    """Start a pool of forked processes that leave Ctrl-C to their parent and do not outlive it.

    `initializer(*arguments)` runs in each. Stopping signals wait until all are forked: raised in
    the middle of a fork, an interruption gets lost in the handlers that run around it.
    """
    started = ProcessPoolExecutor(
        processes, mp_context=FORK, initializer=_begin, initargs=(initializer, arguments)
    )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        started.submit(_begun)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return started


def _begin(initializer: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    initializer(*arguments)


def _begun() -> None:
    """The first task of a pool, whose submission forks its processes."""


def encode(encoder: Encoder, chunks: Iterable[Chunk], workers: int) -> Iterator[Encoded]:
    """Yield the encoded chunks in order, made by `workers` processes (1: by this one).

    Raises EfaError for bad input, and for a worker that was killed.
    """
    if workers == 1:
        yield from map(encoder.chunk, chunks)
        return
    workers_pool = pool(workers, _adopt, encoder)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for chunk in chunks:
            waiting.append(workers_pool.submit(_work, chunk))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise EfaError(
            "a worker was killed, most likely for want of memory: give fewer --workers"
        ) from error
    finally:
        workers_pool.shutdown(cancel_futures=True)
