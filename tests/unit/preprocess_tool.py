"""`tools/preprocess_data.py` as a module, and what its files hold."""

import importlib.util
import itertools
import json
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location(
    "preprocess_data", ROOT / "tools" / "preprocess_data.py"
)
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

PARSER = tool.parser()


def run(*words):
    """Run the tool in this process; its errors are raised."""
    tool.run(PARSER.parse_args([str(word) for word in words]))


def null(folder, vocabulary=1000):
    """The flags of a tokenizer that takes numbers for text, and of an output in `folder`."""
    return ("--output-prefix", folder / "out", "--tokenizer-type", "NullTokenizer",
            "--vocab-size", vocabulary)  # fmt: skip


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def stored(prefix):
    """The documents of a token file: each a list of sequences, each a list of ids."""
    dataset = IndexedDataset(str(prefix))
    bounds = dataset.document_indices
    return [
        [np.asarray(dataset[i]).tolist() for i in range(start, end)]
        for start, end in itertools.pairwise(bounds)
    ]
