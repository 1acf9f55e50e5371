"""What cannot be tokenized is one sentence that says where, and leaves no file behind."""

import gzip
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preprocess_tool import ROOT, null, run, stored, write

from megatron.efa.errors import EfaError


def refused(tmp_path, *words, keep=()):
    """The sentence with which the tool refuses, which must leave only what was there."""
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(EfaError) as error:
        run(*words)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert [p for p in tmp_path.rglob("*partial*")] == []
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "1', "not JSON"),
        ('"1 2"', "a str, where a JSON object is expected"),
        ('{"txt": "1"}', "no key 'text' (it has: txt)"),
        ('{"text": 5}', "key 'text': a int"),
        ('{"text": ["1", null]}', "key 'text': a NoneType"),
        ('{"text": "one"}', "the tokenizer refuses the text"),
        ('{"text": "7 1000"}', "id 1000 is outside the tokenizer's vocabulary of 1000"),
        ('{"text": "7 -1"}', "id -1 is outside"),
        ('{"text": "7 \\ud83d"}', "key 'text': half a character, \\ud83d"),
        ("[" * 100_000, "not JSON (maximum recursion depth"),
    ],
)
def test_a_bad_line_is_named(tmp_path, workers, line, complaint):
    good = '{"text": "1 2"}\n'
    file = tmp_path / "in.jsonl"
    file.write_text(good * 3 + "\n" + line + "\n" + good)
    said = refused(tmp_path, "--input", file, "--workers", workers, *null(tmp_path))
    assert said.startswith(f"{file}, line 5: ")
    assert complaint in said


def test_a_bad_line_in_any_partition_is_named(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "1 2"}\n' * 100 + "{\n")
    words = ("--input", file, "--workers", 4, "--partitions", 4)
    assert f"{file}, line 101: not JSON" in refused(tmp_path, *words, *null(tmp_path))


def test_text_that_is_not_utf8_is_named(tmp_path):
    file = tmp_path / "in.txt"
    file.write_bytes(b"1\n2\n\xff\n")
    said = refused(tmp_path, "--input", file, *null(tmp_path))
    assert said.startswith(f"{file}, line 3: not UTF-8")


@pytest.mark.parametrize("damage", ["cut off", "a bit flipped", "another checksum", "no gzip"])
def test_damaged_gzip_is_named(tmp_path, damage):
    random.seed(1)
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % random.randrange(999) for _ in range(999)))
    file = tmp_path / "in.jsonl.gz"
    file.write_bytes(
        {
            "cut off": whole[:-20],
            "a bit flipped": whole[:200] + bytes([whole[200] ^ 255]) + whole[201:],
            "another checksum": whole[:-8] + bytes(4) + whole[-4:],
            "no gzip": b'{"text": "1"}\n',
        }[damage]
    )
    assert "not whole gzip data" in refused(tmp_path, "--input", file, *null(tmp_path))


def test_files_of_an_earlier_run_survive_a_failing_one(tmp_path):
    file = write(tmp_path / "in.jsonl", [{"text": "1 2"}])
    run("--input", file, *null(tmp_path))
    file.write_text("{")
    refused(tmp_path, "--input", file, *null(tmp_path))
    assert stored(tmp_path / "out_text_document") == [[[1, 2]]]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--input", "nothing-*.jsonl"], "nothing-*.jsonl names no file"),
        (["--split-sentences"], "--split-sentences is for BERT-like models"),
        (["--workers", "0"], "--workers 0 is less than 1"),
        (["--workers", "3", "--partitions", "2"], "not divisible by --partitions 2"),
        (["--tokenizer-type", "SFTTokenizer"], "SFTTokenizer: name a text tokenizer"),
        (
            ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/no/such"],
            "cannot build HuggingFaceTokenizer from /no/such",
        ),
        (["--append-eod", "--null-tokenizer-eod-id", "1000"], "no end-of-document token"),
        (["--output-prefix", "/dev/null/out"], "cannot write to /dev/null"),
        (["--json-keys", "text", "text"], "names 'text' twice"),
        (["--json-keys", "a/b"], "cannot hold a slash"),
        (["--input", "/dev/null"], "/dev/null is no regular file"),
    ],
)
def test_flags_that_cannot_be_obeyed_are_refused(tmp_path, words, complaint):
    file = write(tmp_path / "in.jsonl", [{"text": "1 2"}])
    assert complaint in refused(tmp_path, "--input", file, *null(tmp_path), *words)


@pytest.mark.parametrize("prefix", ["", ".", "..", "data/", "data/.."])
def test_an_output_that_is_a_folder_is_refused(prefix, capsys):
    with pytest.raises(SystemExit):
        run("--input", "x", *null(Path()), "--output-prefix", prefix)
    assert "is a folder: add" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_folder_in_the_place_of_an_output_is_named_and_the_other_file_stays(tmp_path, suffix):
    file = write(tmp_path / "in.jsonl", [{"text": "1 2"}])
    run("--input", file, *null(tmp_path))
    (tmp_path / f"out_text_document{suffix}").unlink()
    (tmp_path / f"out_text_document{suffix}").mkdir()
    said = refused(tmp_path, "--input", file, *null(tmp_path))
    assert said == f"{tmp_path}/out_text_document{suffix}: Is a directory"


def test_an_input_without_a_token_is_refused(tmp_path):
    file = write(tmp_path / "in.jsonl", [{"text": [], "b": "1"}])
    words = ("--input", file, "--json-keys", "b", "text", *null(tmp_path))
    assert "no token under the key 'text'" in refused(tmp_path, *words)


def test_a_file_named_twice_is_refused(tmp_path):
    file = write(tmp_path / "in.jsonl", [{"text": "1 2"}])
    words = ("--input", file, f"{tmp_path}/*.jsonl", *null(tmp_path))
    assert "twice" in refused(tmp_path, *words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path, number):
    file = tmp_path / "in.jsonl"
    with file.open("w") as out:
        for _ in range(40):
            out.write(('{"text": "' + "1 2 3 4 " * 200 + '5"}\n') * 1000)
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(file)]
    command += map(str, (*null(tmp_path / "o"), "--workers", 2))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A shell lets what it starts in the background ignore SIGINT, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(tmp_path.glob("o/.out.partial-*/made/*.bin")):
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.05)
    time.sleep(0.2 * random.random())  # at any moment, also while the workers are being forked
    process.send_signal(number)
    said = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 128 + number, said
    assert list((tmp_path / "o").iterdir()) == []
