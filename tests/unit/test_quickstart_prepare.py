"""Data are prepared once, again when their inputs change, and never half."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.efa.errors import EfaError
from megatron.efa.quickstart import corpus, figures, prepare


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepare") / "data"
    return prepare.prepare(folder, folder.parent / "log", print)


def test_the_token_files_decode_to_the_documents(prepared):
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer, local_files_only=True)
    parts = corpus.split(corpus.documents(corpus.topics()))
    for prefix, documents in zip((prepared.train, prepared.valid), parts, strict=True):
        dataset = IndexedDataset(str(prefix))
        texts = [tokenizer.decode(dataset[i]) for i in range(len(dataset))]
        assert texts == [document.text + corpus.END_OF_DOCUMENT for document in documents]


def test_our_reader_of_tokens_reads_what_megatron_reads(prepared):
    for prefix in (prepared.train, prepared.valid):
        dataset = IndexedDataset(str(prefix))
        expected = np.concatenate([dataset[i] for i in range(len(dataset))])
        found = figures.tokens(prefix)
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


def test_prepared_data_are_used_again_while_the_inputs_stay(prepared, monkeypatch):
    def never(*_):
        raise AssertionError("prepared again")

    monkeypatch.setattr(prepare, "_make", never)
    assert prepare.prepare(prepared.folder, prepared.folder.parent / "log", print) == prepared
    texts = corpus.topics()
    monkeypatch.setattr(corpus, "topics", lambda: texts | {"if": texts["if"] + "."})
    with pytest.raises(AssertionError, match="prepared again"):
        prepare.prepare(prepared.folder, prepared.folder.parent / "log", print)


def test_a_failing_tool_is_told_with_its_log_and_leaves_the_old_data(prepared, monkeypatch):
    texts = corpus.topics()
    monkeypatch.setattr(corpus, "topics", lambda: texts | {"if": texts["if"] + "."})
    flags = prepare._preprocess
    monkeypatch.setattr(prepare, "_preprocess", lambda *a: [*flags(*a), "--json-keys", "nothing"])
    before = sorted(prepared.folder.parent.rglob("*"))
    old = prepared.fingerprint()
    log = prepared.folder.parent / "log"
    with pytest.raises(EfaError, match=r"exit code 2: see .*log"):
        prepare.prepare(prepared.folder, log, print)
    assert "no key 'nothing'" in log.read_text()
    assert sorted(prepared.folder.parent.rglob("*")) == before
    assert prepared.fingerprint() == old
