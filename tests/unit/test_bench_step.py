"""Which arms `bench step` trains, and what it makes of what the ranks saw."""

import argparse
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from megatron.efa.bench import step
from megatron.efa.errors import EfaError

SWITCHES = {"expert": ("--type", "hierarchical"), "data": ("--efa-data-parallel",)}


def names(text, switches=SWITCHES):
    return [arm.name for arm in step.parse_arms(text, switches)]


def test_each_path_comes_alone_and_all_together():
    assert names("off,each,all") == ["off", "expert", "data", "all"]
    arms = step.parse_arms("off,expert+data", SWITCHES)
    assert arms[0].flags == ()
    assert arms[1].flags == ("--type", "hierarchical", "--efa-data-parallel")


def test_the_same_arm_is_not_trained_twice():
    assert names("off,each,all", {"data": ("--efa-data-parallel",)}) == ["off", "data"]
    assert names("off,each,all", {}) == ["off"]


def test_a_path_that_is_not_there_is_told():
    with pytest.raises(EfaError, match=r"'pipeline' is no path of this checkout.*expert, data"):
        step.parse_arms("off,pipeline", SWITCHES)


@pytest.mark.parametrize(
    ("options", "value", "words"),
    [
        ({"action": "store_true"}, None, ("--x",)),
        ({"choices": ["flat", "two-level"]}, None, ("--x", "two-level")),
        ({"choices": ["auto", "off", "on"]}, None, ("--x", "on")),
        ({"choices": ["alltoall", "hierarchical"]}, "hierarchical", ("--x", "hierarchical")),
        ({"choices": ["alltoall"]}, "hierarchical", None),
        ({"choices": ["off"]}, None, None),
    ],
)
def test_switches_are_read_off_the_parser(options, value, words):
    action = argparse.ArgumentParser().add_argument("--x", **options)
    assert step._on("--x", action, value) == words


def rank(ends, sent, losses=()):
    return SimpleNamespace(ends=ends, sent=sent, losses=[{"lm loss": value} for value in losses])


def test_a_step_ends_when_its_last_rank_ends():
    from megatron.efa.bench import step_records

    turn = [rank([1.0, 2.0, 4.0], [10, 30, 50]), rank([1.5, 1.8, 4.5], []),
            rank([0.0, 2.5, 4.0], [0, 5, 7])]  # fmt: skip
    assert step_records.step_seconds(turn, warm_up=1) == [1.0, 2.0]
    assert step_records.step_bytes(turn, warm_up=1) == 20 + 3.5
    assert step_records.step_bytes([rank([1.0], [])], warm_up=1) is None


def test_losses_that_are_no_numbers_never_agree():
    from megatron.efa.bench.step_records import difference

    nan = float("nan")
    assert difference([2.0, 1.0], [2.0, 1.0]) == 0
    assert difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert difference([2.0, nan], [2.0, nan]) == float("inf")
    assert difference([2.0], [2.0, 1.0]) == float("inf")
