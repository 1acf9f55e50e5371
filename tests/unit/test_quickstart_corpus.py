"""The quickstart's corpus is the same everywhere, splits cleanly, and survives its tokenizer."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megatron.efa.errors import EfaError
from megatron.efa.quickstart import corpus

FOUND = corpus.documents(corpus.topics())


def passages(documents):
    return {
        words
        for document in documents
        for passage in document.text.split("\n\n")
        if len(words := " ".join(passage.split())) >= 40
    }


def test_nothing_held_out_is_trained_on():
    train, held_out = corpus.split(FOUND)
    assert {d.topic for d in train}.isdisjoint(d.topic for d in held_out)
    assert passages(train).isdisjoint(passages(held_out))
    # The topics do quote each other, so this is not so by itself.
    raw = [corpus.Document(name, text) for name, text in corpus.topics().items()]
    names = {d.topic for d in held_out}
    assert passages([d for d in raw if d.topic in names]) & passages(
        [d for d in raw if d.topic not in names]
    )


def test_a_tenth_is_held_out_and_the_rest_is_a_corpus():
    train, held_out = corpus.split(FOUND)
    sizes = [sum(len(d.text) for d in part) for part in (train, held_out)]
    assert 0.05 < sizes[1] / sum(sizes) <= 0.1
    assert sizes[0] > 200_000
    assert sorted(train + held_out, key=lambda d: d.topic) == FOUND


def test_the_split_depends_on_the_text_alone():
    texts = corpus.topics()
    again = corpus.documents(dict(reversed(texts.items())))
    assert corpus.split(again) == corpus.split(FOUND)


def test_too_few_documents_are_refused():
    with pytest.raises(EfaError, match="too few"):
        corpus.split(FOUND[:1])


def test_a_python_without_the_topics_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(EfaError, match="libpython3-stdlib"):
        corpus.topics()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    corpus.train_tokenizer(FOUND, 1024, folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(tokenizer, text):
    if corpus.END_OF_DOCUMENT not in text:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id not in ids


def test_the_tokenizer_has_the_size_asked_for_and_compresses(tokenizer):
    assert len(tokenizer) == 1024
    text = FOUND[0].text
    assert len(tokenizer(text).input_ids) < 0.5 * len(text)
