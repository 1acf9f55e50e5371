"""What a run cannot do without is named before any process group is made."""

from argparse import Namespace

import pytest

from megatron.efa import missing
from megatron.efa.errors import EfaError

FULL = {
    "skip_train": False,
    "full_validation": False,
    "train_iters": 3,
    "train_samples": None,
    "lr": 1e-3,
    "eval_interval": 2,
    "mock_data": True,
    "data_path": None,
    "train_data_path": None,
    "data_args_path": None,
    "per_split_data_args_path": None,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 8,
    "vocab_file": None,
    "merge_file": None,
}
GPT2 = {"tokenizer_type": "GPT2BPETokenizer"}


def check(**changes):
    missing.check(Namespace(**FULL | changes))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"train_iters": None}, "--train-iters"),
        ({"lr": None}, "--lr"),
        ({"eval_interval": None}, "--eval-interval"),
        ({"eval_interval": 0}, "--eval-interval"),
        ({"mock_data": False}, "--mock-data"),
        ({"vocab_size": None}, "--vocab-size"),
        (GPT2, "--merge-file"),
    ],
)
def test_what_is_missing_is_named(changes, flag, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EfaError, match=flag):
        check(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_iters": None, "train_samples": 8},
        {"eval_interval": None, "full_validation": True},
        {"skip_train": True, "lr": None, "train_iters": None, "eval_interval": None},
        {"mock_data": False, "train_data_path": ["a"]},
        {"mock_data": False, "data_path": ["a"]},
        GPT2 | {"vocab_file": "v", "merge_file": "m"},
    ],
)
def test_what_stands_for_it_will_do(changes):
    check(**changes)
