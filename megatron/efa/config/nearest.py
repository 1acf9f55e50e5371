"""The nearest valid name, for error sentences."""

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The one of `valid` that `name` was probably meant to be, or None."""
    found = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return found[0] if found else None


def hint(name: str, valid: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no valid name is near."""
    found = nearest(name, valid)
    return f"; did you mean {found}?" if found else ""
