"""Settings to Megatron flags, by what Megatron's own parser says of each argument."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron.efa.config.compose import Setting
from megatron.efa.config.nearest import hint
from megatron.efa.errors import EfaError

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


class Flags:
    """The arguments of a parser by their names (argparse's dest), and the flags that set them."""

    def __init__(self, parser: argparse.ArgumentParser, hidden: Sequence[str] = ()) -> None:
        """`hidden` names arguments that a config may not set."""
        self._options = parser._option_string_actions
        self._actions: dict[str, list[argparse.Action]] = {}
        for action in parser._actions:
            if action.option_strings and action.dest not in hidden:
                self._actions.setdefault(action.dest, []).append(action)

    def names(self) -> list[str]:
        return list(self._actions)

    def actions(self, name: str) -> list[argparse.Action]:
        return self._actions[name]

    def of(self, setting: Setting) -> list[str]:
        """Return the words that give `setting`'s value to its argument; none for a default.

        Raises EfaError, naming place and key, if the argument does not exist or refuses the value.
        """
        subject = f"{setting.where}: {setting.name}"
        if setting.key not in self._actions:
            raise EfaError(f"{subject}: {self._unknown(setting.key)}")
        actions = self._actions[setting.key]
        if actions[0].nargs == 0 or isinstance(actions[0], argparse.BooleanOptionalAction):
            return _switch(actions, setting.value, subject)
        return _valued(actions[0], setting.value, subject)

    def given(self, words: Sequence[str]) -> dict[str, str]:
        """Which arguments the flags in `words` set, each with its flag as it was written."""
        found = (word.partition("=")[0] for word in words if word.startswith("--"))
        return {self._options[flag].dest: flag for flag in found if flag in self._options}

    def _unknown(self, key: str) -> str:
        action = self._options.get(f"--{key.replace('_', '-')}")
        if action is not None and action.dest in self._actions:
            value = ": false" if isinstance(action, argparse._StoreFalseAction) else ""
            flag, name = action.option_strings[0], action.dest
            return f"{flag} sets the argument {name}; write {name}{value}"
        return f"Megatron has no argument {key!r}{hint(key, self._actions)}"


def _switch(actions: list[argparse.Action], value: Any, subject: str) -> list[str]:
    """A flag without a value: `--x`, `--no-x`, or both."""
    if not isinstance(value, bool):
        raise EfaError(f"{subject} is {_show(value)}, but wants true or false")
    flags: dict[bool, str] = {}
    for action in actions:
        if isinstance(action, argparse.BooleanOptionalAction):
            negative = next(o for o in action.option_strings if o.startswith("--no-"))
            flags |= {True: _flag(action), False: negative}
        else:
            flags[bool(action.const)] = _flag(action)
    if value in flags:
        return [flags[value]]
    if bool(actions[0].default) is value:
        return []
    raise EfaError(f"{subject} is {_show(value)}, but no flag of Megatron's can say that")


def _valued(action: argparse.Action, value: Any, subject: str) -> list[str]:
    """A flag with one value or, where the parser takes several, a list of them."""
    flag = _flag(action)
    if action.nargs is None:
        text = _text(action, value, subject)
        if text == "--":  # argparse drops this word wherever it stands
            raise EfaError(f"{subject}: '--' ends the flags; it cannot be a value")
        return [f"{flag}={text}"] if text.startswith("-") or not text else [flag, text]
    values = value if isinstance(value, list) else [value]
    if isinstance(action.nargs, int) and len(values) != action.nargs:
        raise EfaError(f"{subject} has {len(values)} values, but {flag} takes {action.nargs}")
    if not values and action.nargs == "+":
        if action.default == []:
            return []
        raise EfaError(f"{subject} is an empty list, but {flag} takes one value or more")
    texts = [_text(action, item, subject) for item in values]
    for text in texts:
        if text.startswith("-") and not _NEGATIVE_NUMBER.fullmatch(text):
            raise EfaError(f"{subject}: {text!r} would be read as a flag; it cannot begin with '-'")
    return [flag, *texts]


def _text(action: argparse.Action, value: Any, subject: str) -> str:
    """Spell one value so that the parser reads it back, or raise EfaError if it would not."""
    wanted = _kind(action.type)
    wrong = EfaError(f"{subject} is {_show(value)}, but {_flag(action)} wants {wanted}")
    if isinstance(value, list) and wanted == "an expression":
        value = json.dumps(value, separators=(",", ":"))
        value = value if _accepts(action.type, value) else value.strip("[]")
    if action.type is bool:
        # argparse's bool() takes any word for true; only the empty one is false
        if not isinstance(value, bool):
            raise wrong
        return "True" if value else ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise wrong
    if action.type is int and isinstance(value, float):
        raise wrong
    text = value if isinstance(value, str) else repr(value)
    if not _accepts(action.type, text):
        raise _bad_choice(action, text, subject) if action.choices else wrong
    if action.choices is not None and _converted(action.type, text) not in action.choices:
        raise _bad_choice(action, text, subject)
    return text


def _bad_choice(action: argparse.Action, text: str, subject: str) -> EfaError:
    names = [getattr(choice, "name", str(choice)) for choice in action.choices]
    return EfaError(
        f"{subject} is {text!r}, but {_flag(action)} takes one of {', '.join(names)}"
        f"{hint(text, names)}"
    )


def _accepts(kind: Callable[[str], Any] | None, text: str) -> bool:
    try:
        _converted(kind, text)
    except Exception:  # whatever upstream's converter raises, it is a refusal
        return False
    return True


def _converted(kind: Callable[[str], Any] | None, text: str) -> Any:
    return text if kind is None else kind(text)


def _kind(kind: Callable[[str], Any] | None) -> str:
    names = {None: "text", str: "text", int: "an integer", float: "a number", bool: "true or false"}
    return names.get(kind, "an expression")


def _flag(action: argparse.Action) -> str:
    """The spelling users know: the one after the argument's name, else the first."""
    own = f"--{action.dest.replace('_', '-')}"
    return own if own in action.option_strings else action.option_strings[0]


def _show(value: Any) -> str:
    """A value as YAML writes it."""
    return json.dumps(value, default=str)
