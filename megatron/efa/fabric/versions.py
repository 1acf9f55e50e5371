"""EFA's software by release (`versions.yaml`): what goes together, and what is a trap."""

import functools
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.efa.errors import EfaError

PATH = Path(__file__).with_name("versions.yaml")
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Trap:
    """Releases that fail together, the failure's id, and what to do."""

    failure: str
    level: str
    when: Mapping[str, str]
    why: str
    do: str
    unless: Mapping[str, str] | None = None

    def matches(self, versions: Mapping[str, str], environ: Mapping[str, str]) -> bool:
        """Whether all of `when` is known to hold, and the environment does not avoid it."""
        if any(environ.get(name) == value for name, value in (self.unless or {}).items()):
            return False
        return all(
            versions.get(what) and holds(condition, versions[what])
            for what, condition in self.when.items()
        )


@functools.cache
def matrix() -> dict[str, Any]:
    """The file, parsed."""
    import yaml

    return yaml.safe_load(PATH.read_text())


@functools.cache
def traps() -> tuple[Trap, ...]:
    """All traps."""
    return tuple(Trap(**entry) for entry in matrix()["traps"])


def brought_by(installer: str) -> dict[str, str]:
    """Versions that an EFA release brings, by part; empty for one that the file does not know."""
    return {k: str(v) for k, v in matrix()["installers"].get(installer, {}).items()}


def holds(condition: str, version: str) -> bool:
    """Whether `version` meets `condition`, as in ">=1.17,<1.17.3". Raises EfaError if it is none.

    Numbers are compared, with missing ones as 0; suffixes such as amzn1.0 are not.
    """
    for part in condition.split(","):
        found = re.fullmatch(r"\s*(>=|<=|==|>|<)\s*(\d+(?:\.\d+)*)\s*", part)
        if not found:
            raise EfaError(f"{PATH}: '{condition}' is no condition: write it like >=1.17,<1.17.3")
        given, limit = numbers(version), numbers(found[2])
        width = max(len(given), len(limit))
        if not _COMPARED[found[1]](_padded(given, width), _padded(limit, width)):
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """(2, 4, 0) of "2.4.0amzn1.0"; empty if it does not begin with a number."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def _padded(version: tuple[int, ...], width: int) -> tuple[int, ...]:
    return version + (0,) * (width - len(version))
