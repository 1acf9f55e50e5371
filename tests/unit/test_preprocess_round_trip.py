"""The token files hold what the tokenizer makes of each document, in order, however it was made."""

import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocess_tool import null, run, stored, write
from transformers import AutoTokenizer

from megatron.efa.preprocess.documents import Source, chunks, documents, partition
from megatron.efa.quickstart import corpus


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    text = "A class definition defines a class object. def f(x):\n    return x\n"
    corpus.train_tokenizer([corpus.Document("t", text)], 280, folder)
    return folder


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUE = TEXT | st.lists(TEXT, max_size=3)


@settings(max_examples=25, deadline=None)
@given(values=st.lists(VALUE, min_size=1, max_size=6), append_eod=st.booleans())
def test_documents_are_stored_as_the_tokenizer_encodes_them(
    bpe, tmp_path_factory, values, append_eod
):
    folder = tmp_path_factory.mktemp("round")
    if not any(map(any, values)):
        values = [*values, "%"]  # a data set with no token at all is refused
    file = write(folder / "in.jsonl", [{"text": value} for value in values])
    run("--input", file, "--output-prefix", folder / "out", "--workers", 1,
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", bpe,
        *(["--append-eod"] if append_eod else []))  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    expected = []
    for value in values:
        texts = value if isinstance(value, list) else [value]
        sequences = [ids for text in texts if (ids := tokenizer(text).input_ids)]
        if sequences and append_eod:
            sequences[-1].append(tokenizer.eos_token_id)
        expected.append(sequences)
    assert stored(folder / "out_text_document") == expected


def test_every_key_has_files_of_its_own(tmp_path):
    file = write(tmp_path / "in.jsonl", [{"a": "1 2", "b": "3"}, {"a": "4", "b": "5 6", "c": 0}])
    run("--input", file, "--json-keys", "a", "b", *null(tmp_path))
    assert stored(tmp_path / "out_a_document") == [[[1, 2]], [[4]]]
    assert stored(tmp_path / "out_b_document") == [[[3]], [[5, 6]]]


def numbers(seed, count):
    source = random.Random(seed)
    return [
        {"text": " ".join(str(source.randrange(999)) for _ in range(source.randrange(1, 400)))}
        for _ in range(count)
    ]


def test_bytes_do_not_depend_on_workers_or_partitions(tmp_path):
    for i in range(3):
        write(tmp_path / f"in{i}.jsonl", numbers(i, 2000))
    with gzip.open(tmp_path / "in4.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in numbers(4, 2000))
    written = {}
    for workers, partitions in [(1, 1), (2, 1), (5, 1), (2, 2), (6, 3)]:
        folder = tmp_path / f"{workers}-{partitions}"
        run("--input", f"{tmp_path}/in*", "--append-eod", "--workers", workers,
            "--partitions", partitions, *null(folder))  # fmt: skip
        assert sorted(p.name for p in folder.iterdir()) == [
            "out_text_document.bin",
            "out_text_document.idx",
        ]
        written[workers, partitions] = [p.read_bytes() for p in sorted(folder.iterdir())]
    assert all(files == written[1, 1] for files in written.values())
    assert len(stored(tmp_path / "1-1" / "out_text_document")) == 8000


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(
        st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=3
    ),  # lengths of the texts of each file
    ends=st.booleans(),
    size=st.integers(1, 200),
    parts=st.integers(1, 5),
)
def test_no_cut_loses_or_doubles_a_line(tmp_path_factory, files, ends, size, parts):
    folder = tmp_path_factory.mktemp("cut")
    sources, texts = [], []
    for i, lengths in enumerate(files):
        file = folder / f"{i}.jsonl"
        lines = [json.dumps({"text": f"{i}.{j} " + "x" * n}) for j, n in enumerate(lengths)]
        file.write_text("\n".join(lines) + ("\n" if ends else ""))
        sources.append(Source(file, "jsonl", file.stat().st_size))
        texts += [json.loads(line)["text"] for line in lines]
    runs = partition(sources, parts)
    assert len(runs) <= parts
    found = [
        values[0]
        for run_ in runs
        for chunk in chunks(run_, size)
        for _, values in documents(chunk, ["text"], "file")
    ]
    assert found == texts


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("file", ["one\ntwo\n\n\nthree\n"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("line", ["one", "two", "three"]),
    ],
)
def test_plain_text_is_split_as_asked(tmp_path, split, expected):
    file = tmp_path / "in.txt"
    file.write_text("one\ntwo\n\n\nthree\n")
    (chunk,) = chunks([Source(file, "text", file.stat().st_size)])
    assert [values[0] for _, values in documents(chunk, ["text"], split)] == expected


def test_globs_take_files_in_sorted_order_and_know_text_by_its_suffix(tmp_path):
    write(tmp_path / "b.jsonl", [{"text": "3"}])
    Path(tmp_path / "a.txt").write_text("1 2")
    run("--input", f"{tmp_path}/*.*", *null(tmp_path / "o"))
    assert stored(tmp_path / "o" / "out_text_document") == [[[1, 2]], [[3]]]


def test_measuring_workers_writes_nothing(tmp_path, capsys):
    file = write(tmp_path / "in.jsonl", numbers(0, 50))
    run("--input", file, "--find-optimal-num-workers", "--workers-to-check", 1, 2,
        *null(tmp_path / "o"))  # fmt: skip
    assert "fastest: --workers" in capsys.readouterr().out
    assert not (tmp_path / "o").exists()
