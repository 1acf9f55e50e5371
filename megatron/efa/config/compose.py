"""Compose a config file, what its defaults list names, and overrides, with Hydra.

What comes out is a flat list of settings, each of which knows where it was written. Nothing here
knows Megatron's arguments, so that a mistake in the YAML is told before Megatron is imported.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from megatron.efa.config.nearest import hint
from megatron.efa.config.words import GROUPS, LAUNCH
from megatron.efa.errors import EfaError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
"""The project's own configs; any config may name them in its defaults list (`/model: NAME`)."""

_NOT_GROUPS = f"a config holds groups ({', '.join(GROUPS)}), not a list or a single value"

_CHOICE = re.compile(rf"({'|'.join((*GROUPS, LAUNCH))})=")
_VALUE = re.compile(r"([\w]+)\.([^=]+)=")


@dataclass(frozen=True)
class Setting:
    """One leaf of the composed config: `group.key = value`, written at `where`."""

    group: str
    key: str
    value: Any
    where: str

    @property
    def name(self) -> str:
        return f"{self.group}.{self.key}"


@dataclass(frozen=True)
class _Source:
    """A search path: the folder of the user's file (if there is one), then the project's."""

    config: Path | None

    @property
    def folders(self) -> list[Path]:
        return list(dict.fromkeys([self.config.parent, EXAMPLES] if self.config else [EXAMPLES]))

    @property
    def name(self) -> str | None:
        return self.config.stem if self.config else None

    def file(self, config_path: str) -> Path:
        """The file that Hydra takes for `config_path` (first folder wins)."""
        candidates = [folder / f"{config_path}.yaml" for folder in self.folders]
        return next((file for file in candidates if file.is_file()), candidates[0])


def compose(config: str | None, overrides: Sequence[str] = ()) -> list[Setting]:
    """Return the settings for Megatron that file `config` (or none) and `overrides` make together.

    That is `compose_all` without the group `launch`. Raises EfaError, one line, for whatever is
    wrong with a file or an override.
    """
    return [setting for setting in compose_all(config, overrides) if setting.group != LAUNCH]


def compose_all(config: str | None, overrides: Sequence[str] = ()) -> list[Setting]:
    """Return all settings that file `config` (or none) and `overrides` make together.

    A value is a str, int, float, bool, or a list of them; null counts as not given and is left out.
    A key of the group `launch` may hold keys: it is then a name with dots. Raises EfaError, one line, for whatever is wrong with a file or an override.
    """
    if config is None and not overrides:
        return []
    source = _Source(_existing(config))
    folder = source.folders[0]
    try:
        with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            _check_grammar(overrides)
            words = [_searchpath(), *_hydra_words(loader, source, overrides)]
            places = _places(loader, source, words)
            _check_groups(places)
            composed = hydra_compose(source.name, overrides=words)
    except yaml.MarkedYAMLError as error:
        raise EfaError(_yaml_sentence(error)) from None
    except MissingConfigException as error:
        raise EfaError(_missing_sentence(error, source, overrides)) from None
    except RecursionError:
        place = _short(source.config) if source.config else "the command line"
        raise EfaError(f"{place}: its defaults list leads back to itself") from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
        raise EfaError(_hydra_sentence(error, source)) from None
    places |= _override_places(overrides)
    return _settings(composed, places)


def _existing(config: str | None) -> Path | None:
    if config is None:
        return None
    path = Path(config).absolute()
    if not path.is_file():
        others = [file.name for file in path.parent.glob("*.yaml")]
        raise EfaError(f"--config {config}: there is no such file{hint(path.name, others)}")
    if path.suffix != ".yaml":
        raise EfaError(f"--config {config}: the name of a config file must end in .yaml")
    return path


def _searchpath() -> str:
    quoted = EXAMPLES.as_uri().replace("'", r"\'")
    return f"hydra.searchpath=['{quoted}']"


def _check_grammar(overrides: Sequence[str]) -> None:
    parser = OverridesParser.create()
    for word in overrides:
        key = word.partition("=")[0]
        try:
            sweep = parser.parse_override(word).is_sweep_override()
        except HydraException as error:
            why = _first_line(error).partition(" expecting {")[0]
            advice = f"a value with special characters needs quotes of its own, {key}='\"...\"'"
            raise EfaError(f"the override {word} cannot be read ({why}): {advice}") from None
        if sweep:
            advice = f"write {key}=[...] for a list, {key}='\"...\"' for text"
            raise EfaError(f"the override {word} has several values: {advice}")


def _hydra_words(loader: ConfigLoader, source: _Source, overrides: Sequence[str]) -> list[str]:
    """Spell overrides for Hydra, so that nobody needs to know whether a file already has the key.

    `train.lr=1` sets or adds (Hydra's `++`); `model=NAME` replaces a group's choice or adds one.
    """
    defaults = loader.compute_defaults_list(source.name, [_searchpath()], RunMode.RUN)
    chosen = set(defaults.overrides.known_choices)
    words = []
    for word in overrides:
        choice, value = _CHOICE.match(word), _VALUE.match(word)
        if choice and choice[1] not in chosen:
            words.append(f"+{word}")
        elif value:
            words.append(f"++{word}")
        else:
            words.append(word)
    return words


def _places(loader: ConfigLoader, source: _Source, words: list[str]) -> dict[str, str]:
    """Where each `group.key` was written last, as FILE:LINE."""
    places: dict[str, str] = {}
    for item in loader.compute_defaults_list(source.name, words, RunMode.RUN).defaults:
        if item.config_path is None or item.config_path.startswith("hydra/"):
            continue
        file = source.file(item.config_path)
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if root is not None:
            if not isinstance(root, yaml.MappingNode):
                raise EfaError(f"{_short(file)}:1: {_NOT_GROUPS}")
            _mark(root, (item.package or "").split(".") if item.package else [], file, places)
    return places


def _mark(node: yaml.Node, path: list[str], file: Path, places: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        if not path and key.value == "defaults":
            continue
        inner = [*path, str(key.value)]
        places[".".join(inner)] = f"{_short(file)}:{key.start_mark.line + 1}"
        _mark(value, inner, file, places)


def _check_groups(places: dict[str, str]) -> None:
    for path, place in places.items():
        if path.partition(".")[0] not in (*GROUPS, LAUNCH):
            raise EfaError(
                f"{place}: {path!r} is not a group; a key stands under one of "
                f"{', '.join(GROUPS)}{hint(path, (*GROUPS, LAUNCH))}"
            )


def _override_places(overrides: Sequence[str]) -> dict[str, str]:
    found = (_VALUE.match(word.lstrip("+")) for word in overrides)
    return {f"{m[1]}.{m[2]}": f"the override {m.string}" for m in found if m}


def _settings(composed: DictConfig, places: dict[str, str]) -> list[Setting]:
    """Flatten the composed config; each group holds keys, each key at most a list."""
    names = [f"{group}.{key}" for group in composed for key in _keys(composed, group)]
    settings: dict[str, Setting] = {}
    for group in map(str, composed):
        place = places.get(group, "the config")
        if composed._get_node(group)._is_none():
            continue
        if not isinstance(composed[group], DictConfig):
            raise EfaError(
                f"{place}: {group} must hold `key: value` lines (a file is chosen in the defaults "
                f"list, or by {group}=NAME), not {OmegaConf.to_container(composed)[group]!r}"
            )
        for key in map(str, composed[group]):
            name = f"{group}.{key}"
            inner = (at for path, at in places.items() if path.startswith(f"{name}."))
            where = places.get(name) or next(inner, place)
            value = _resolved(composed[group], key, f"{where}: {name}", names)
            if value is None:
                continue
            if group == LAUNCH:
                settings |= {s.name: s for s in _flat(Setting(group, key, value, where), places)}
                continue
            if key in settings:
                other = settings[key]
                raise EfaError(
                    f"{key} is set twice, as {other.name} ({other.where}) and as {name} ({where}): "
                    "a key may stand in any group, but in one only"
                )
            settings[key] = Setting(group, key, value, where)
    return list(settings.values())


def _flat(setting: Setting, places: dict[str, str]) -> list[Setting]:
    """A setting of `launch`, or those that it holds."""
    if not isinstance(setting.value, dict):
        return [setting] if setting.value is not None else []
    inner = (
        Setting(
            setting.group,
            f"{setting.key}.{key}",
            value,
            places.get(f"{setting.name}.{key}", setting.where),
        )
        for key, value in setting.value.items()
    )
    return [leaf for one in inner for leaf in _flat(one, places)]


def _keys(composed: DictConfig, group: Any) -> list[str]:
    node = composed._get_node(group)
    return list(map(str, node)) if isinstance(node, DictConfig) and not node._is_none() else []


def _resolved(group: DictConfig, key: str, subject: str, names: list[str]) -> Any:
    """The value with its interpolations resolved; raises EfaError, naming `subject`."""
    try:
        value = group[key]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except InterpolationKeyError as error:
        sought = re.search(r"'(.+?)' not found", str(error))
        near = hint(sought[1], names) if sought else ""
        raise EfaError(f"{subject}: {_first_line(error)}{near}") from None
    except OmegaConfBaseException as error:
        raise EfaError(f"{subject}: {_first_line(error)}") from None
    if isinstance(value, dict) and group._key() != LAUNCH:
        raise EfaError(f"{subject} is a mapping, but keys stand directly under their group")
    return value


def _yaml_sentence(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"{_short(Path(mark.name))}:{mark.line + 1}" if mark else "the config"
    return f"{place}: not valid YAML: {error.problem or error.context}"


def _missing_sentence(
    error: MissingConfigException, source: _Source, overrides: Sequence[str]
) -> str:
    sought = str(error.missing_cfg_file).lstrip("/")
    group, _, name = sought.rpartition("/")
    named = re.match(r"In '(.+?)'", str(error))
    place = str(_short(source.file(named[1]))) if named else "the command line"
    for word in overrides:
        if word.lstrip("+") == f"{group}={name}":
            place = f"the override {word}"
    folders = " or ".join(str(_short(path / group)) for path in source.folders)
    return f"{place}: there is no {name}.yaml in {folders}{hint(name, error.options or [])}"


def _hydra_sentence(error: Exception, source: _Source) -> str:
    place = _short(source.config) if source.config else "the command line"
    what = _first_line(error)
    if "must be a DictConfig" in what:
        what = _NOT_GROUPS
    return f"{place}: {what}"


def _first_line(error: Exception) -> str:
    """An error's first line: OmegaConf and Hydra append their internals below it."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def _short(path: Path) -> Path:
    """`path` as the user would write it from here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
