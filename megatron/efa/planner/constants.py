"""The time model's fitted constants: read from and written to data/constants.yaml."""

import os
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import yaml

from megatron.efa.aside import beside
from megatron.efa.planner.fit import NAMES

FILE = Path(__file__).parent / "data/constants.yaml"
PUBLISHED = Path(__file__).parent / "data/published_steps.csv"


@cache
def load() -> dict[str, float]:
    """The constants fitted to all published steps."""
    text = resources.files("megatron.efa.planner").joinpath("data/constants.yaml").read_text()
    return yaml.safe_load(text)


def logs() -> np.ndarray:
    """Logarithms of the fitted constants, in the order of NAMES."""
    return np.log([load()[name] for name in NAMES])


def save(values: dict[str, float], path: Path = FILE) -> None:
    """Write constants as YAML, whole or not at all."""
    head = "# Fitted by tools/fit_planner.py to published_steps.csv; meanings in docs/planner.md.\n"
    body = "".join(f'"{name}": {value:.5g}\n' for name, value in values.items())
    with beside(path) as folder:
        (folder / path.name).write_text(head + body)
        os.replace(folder / path.name, path)
