"""Which environment variables a job over EFA needs, and what is wrong with those that it has.

All of it is data, with sources: `environment.yaml`.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron.efa.errors import EfaError

PATH = Path(__file__).with_name("environment.yaml")
CPU = "cpu"
"""The `accelerator` of jobs without GPUs, which use neither NCCL nor EFA."""

Level = Literal["fail", "warn", "info"]
LEVELS: tuple[Level, ...] = ("fail", "warn", "info")


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a variable that is set."""

    name: str
    value: str
    level: Level
    """fail: no EFA, or a hang; warn: slower, or a trap; info: useless, or for a special case."""
    why: str
    remedy: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.why}: {self.remedy}"


def needed(plugin: str | None, accelerator: str) -> dict[str, str]:
    """The variables, with their values, that a job needs and that nothing sets by itself.

    `plugin` is the version of aws-ofi-nccl, such as 1.21.1 (None: not known, counts as the
    newest); `accelerator` is the GPU's name as the catalogue has it, or `CPU`. Raises EfaError for
    what is no version.
    """
    if accelerator == CPU:
        return {}
    return {entry["name"]: entry["value"] for entry in _needed(plugin)}


def reasons(plugin: str | None) -> dict[str, str]:
    """Why each variable of `needed` is needed, with the source."""
    sources = _data()["sources"]
    return {e["name"]: f"{e['why']} ({sources[e['source']]})" for e in _needed(plugin)}


def verdicts(environ: Mapping[str, str], plugin: str | None) -> list[Verdict]:
    """What is to be said of `environ`, the worst first; variables that are fine are left out.

    `plugin` as for `needed`. Raises EfaError for what is no version.
    """
    version = _version(plugin)
    found = (_verdict(name, value, version) for name, value in sorted(environ.items()))
    return sorted((v for v in found if v), key=lambda verdict: LEVELS.index(verdict.level))


def _verdict(name: str, value: str, version: Version) -> Verdict | None:
    for rule in _data()["verdicts"]:
        pattern = rule.get("value")
        if (
            fnmatchcase(name, rule["name"])
            and (pattern is None or re.fullmatch(pattern, value.strip(), re.IGNORECASE))
            and _covers(rule, version)
        ):
            source = _data()["sources"][rule["source"]]
            return Verdict(name, value, rule["level"], rule["why"], rule["remedy"], source)
    return None


def _needed(plugin: str | None) -> list[dict[str, Any]]:
    version = _version(plugin)
    return [entry for entry in _data()["needed"] if _covers(entry, version)]


def _covers(entry: Mapping[str, Any], version: Version) -> bool:
    return version in SpecifierSet(entry.get("plugin", ""))


def _version(plugin: str | None) -> Version:
    """A version as the plugin prints it (1.7.4-aws, v1.21.1); None: the newest."""
    if plugin is None:
        return Version(_data()["newest"])
    match = re.fullmatch(r"v?(\d+(?:\.\d+)+)(?:[-+.]?aws)?", plugin.strip())
    if match is None:
        raise EfaError(
            f"'{plugin}' is no version of aws-ofi-nccl: write it as the plugin prints it at start "
            "(NCCL_DEBUG=INFO), like 1.21.1"
        )
    return Version(match[1])


@functools.cache
def _data() -> dict[str, Any]:
    import yaml

    return yaml.safe_load(PATH.read_text())
