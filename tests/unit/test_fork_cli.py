"""The command line of `megatron-efa fork`: one sentence and a non-zero exit, or what was done."""

import argparse

import pytest
from fork_checkout import A, Checkout

from megatron.efa import cli
from megatron.efa.fork import cli as room
from megatron.efa.fork.layout import Layout


@pytest.fixture
def fork(tmp_path, monkeypatch, capsys):
    """Run `megatron-efa fork ...` on a checkout; returns exit code, stdout and stderr."""
    checkout = Checkout(tmp_path, monkeypatch)
    monkeypatch.setattr(Layout, "of_this_checkout", classmethod(lambda cls: checkout.layout))

    def run(*words):
        code = cli.main(["fork", *words])
        return (code, *capsys.readouterr())

    run.checkout = checkout
    return run


def test_a_round_of_all_actions(fork):
    wheels = str(fork.checkout.wheels)
    assert fork("verify")[0] == 2
    assert fork("sync", "--from", wheels)[0] == 0
    assert "exactly base + series" in fork("verify", "--full")[1]
    assert fork("export")[:2] == (0, "wrote 0001-first.patch, 0002-second.patch\n")
    assert "the series makes this very tree" in fork("export")[1]
    fork.checkout.edit(A, "a12 = 12\n", "a12 = 12\nnew = 1\n")
    assert fork("export", "--new", "a hook")[1] == "wrote 0003-a-hook.patch; fill in its header\n"
    assert "3 of 15 patches" in fork("status")[1]
    assert "megatron/ is now megatron-core 1.0 + 2 patches" in fork("export", "--drop", "3")[1]
    fork.checkout.release("1.1", {**fork.checkout.tree(), A: b"a0 = 0\n"})
    assert fork("rebase", "--to", "1.1", "--from", wheels)[0] == 2
    assert "is forgotten" in fork("rebase", "--abort")[1]


def test_an_error_is_one_sentence_on_stderr_and_exit_code_2(fork):
    code, out, err = fork("verify")
    assert (code, out) == (2, "")
    assert err.startswith("megatron-efa: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["rebase"],
        ["rebase", "--to", "1.1", "--abort"],
        ["export", "--into", "one"],
        ["export", "--new", "x", "--into", "1"],
        [],
    ],
)
def test_words_that_make_no_sense_are_refused_by_the_parser(words, capsys):
    parser = argparse.ArgumentParser()
    room.add_arguments(parser)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(words)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_one_wheel_or_a_directory_but_not_both(fork):
    assert "exclude each other" in fork("sync", "--wheel", "x.whl", "--from", ".")[2]


@pytest.mark.parametrize("version", ["latest", "0.19.x", ""])
def test_a_release_that_is_no_version_is_told_before_anything_is_fetched(
    fork, monkeypatch, version
):
    monkeypatch.setattr("megatron.efa.fork.rebase.obtain", lambda *_, **__: pytest.fail("fetched"))
    code, out, err = fork("rebase", "--to", version)
    assert (code, out) == (2, "")
    assert err == f"megatron-efa: --to {version} is no version: give one such as 0.19.2\n"


def test_ctrl_c_is_one_line(fork, monkeypatch):
    def stopped(args, layout):
        raise KeyboardInterrupt

    monkeypatch.setitem(room._ACTIONS, "sync", stopped)
    assert fork("sync") == (130, "", "megatron-efa: fork was stopped by Ctrl-C\n")
