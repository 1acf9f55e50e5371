"""Arguments that a training run cannot do without, of which upstream's own checks say nothing.

Without one of these Megatron 0.19 ends in a TypeError, late, on every rank.
"""

import importlib.util
from argparse import Namespace

from megatron.efa.errors import EfaError

_DATA = ("mock_data", "data_path", "train_data_path", "data_args_path", "per_split_data_args_path")


def check(args: Namespace) -> None:
    """Raise EfaError naming the first argument that is missing from `args`, and what to give."""
    if not args.skip_train:
        _check_training(args)
    if not any(getattr(args, name) for name in _DATA):
        raise EfaError(
            "no data are named: give --data-path PREFIX (what tools/preprocess_data.py writes), "
            "or --mock-data to train on made-up tokens"
        )
    _check_tokenizer(args)


def _check_training(args: Namespace) -> None:
    if not (args.train_iters or args.train_samples):
        raise EfaError("--train-iters is missing: give the steps to train, or --train-samples")
    if args.lr is None:
        raise EfaError("--lr is missing: give the highest learning rate")
    if not (args.full_validation or args.eval_interval):
        raise EfaError(
            "--eval-interval is missing, without which Megatron cannot count the samples it needs: "
            "give the steps between two validations; more than --train-iters means none"
        )


def _check_tokenizer(args: Namespace) -> None:
    kind = args.tokenizer_type
    if kind == "NullTokenizer" and args.vocab_size is None:
        raise EfaError("--vocab-size is missing, which --tokenizer-type NullTokenizer needs")
    can_download = importlib.util.find_spec("wget") is not None
    if kind == "GPT2BPETokenizer" and not (can_download or (args.vocab_file and args.merge_file)):
        raise EfaError(
            "--vocab-file and --merge-file are missing, which --tokenizer-type GPT2BPETokenizer "
            "(the default) reads: give both, or another --tokenizer-type"
        )
