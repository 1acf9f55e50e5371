"""Show what a config comes to: YAML that can be used as a config itself, and its flags."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf

from megatron.efa.config.compose import Setting
from megatron.efa.config.words import GROUPS


def show(settings: Sequence[Setting], flags: Sequence[list[str]], given: Sequence[str]) -> str:
    """Return the settings as YAML, each with its place, then their `flags` and the `given` ones."""
    lines = []
    for group in GROUPS:
        inside = [setting for setting in settings if setting.group == group]
        lines += [f"{group}:"] if inside else []
        for setting in inside:
            lines.append(f"  {setting.key}: {_yaml(setting.value)}  # {setting.where}")
    lines.append("# as Megatron flags:")
    lines += [f"#   {shlex.join(part)}" for part in flags if part]
    if given:
        lines += ["# and from the command line:", f"#   {shlex.join(given)}"]
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """`value` on one line, spelt so that OmegaConf reads it back (to it, 1e-3 is a number)."""
    dumped = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    text = dumped.removesuffix("\n...\n").rstrip()
    if "\n" not in text and "${" not in text and OmegaConf.create(f"x: {text}").x == value:
        return text
    return json.dumps(value, ensure_ascii=False).replace("${", "\\\\${")
