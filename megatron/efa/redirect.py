"""Rebinding names of other modules: each checked, each recorded, each undone."""

import os
from collections.abc import Callable
from typing import Any

from megatron.efa.errors import EfaError

_ABSENT = object()


class Redirection:
    """A set of rebound attributes that knows how to put everything back.

    An attribute that is not there is an error unless it is declared new: a redirection that
    silently does nothing because its target has moved is worse than none.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any, *, new: bool = False) -> None:
        """Bind `owner.name` to `value`.

        Raises:
            EfaError: `owner` has no such attribute and `new` is False.
        """
        if not new:
            self._check(owner, name)
        # An inherited attribute is shadowed, so undoing it means deleting ours.
        self._changes.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Bind `owner.name` to `wrapper(what it was)`; raises like `set`."""
        self._check(owner, name)
        self.set(owner, name, wrapper(getattr(owner, name)))

    def _check(self, owner: Any, name: str) -> None:
        if not hasattr(owner, name):
            raise EfaError(
                f"cannot redirect {self._label(owner, name)}: this PyTorch does not have it; "
                "install a PyTorch release named in pyproject.toml."
            )

    def set_environment(self, name: str, value: str) -> None:
        """Set an environment variable that is not set yet."""
        if name not in os.environ:
            os.environ[name] = value
            self._changes.append((os.environ, name, _ABSENT))

    def undo(self) -> None:
        """Put everything back, the latest change first."""
        while self._changes:
            owner, name, old = self._changes.pop()
            if owner is os.environ:
                owner.pop(name, None)
            elif old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    def names(self) -> list[str]:
        """The rebound attributes, in order, as dotted names."""
        return [self._label(owner, name) for owner, name, _ in self._changes]

    @staticmethod
    def _label(owner: Any, name: str) -> str:
        if owner is os.environ:
            return f"os.environ[{name!r}]"
        module = getattr(owner, "__module__", None)
        inner = getattr(owner, "__qualname__", None) or owner.__name__
        return ".".join(part for part in (module, inner, name) if part)
