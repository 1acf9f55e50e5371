"""The checks: small functions that look at one thing each and say what they found.

    @check("memlock", "locked memory is not limited", covers=["F14"])
    def memlock(host, context):
        yield ok("unlimited")

A check lives in a module of `doctor/checks`, which is imported whole: to add one is a function
there and a test. It yields one finding or more: also when all is well, for a check that says
nothing has not looked. What it cannot see it says with `raise Skip(reason)`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.efa.doctor.context import Context
    from megatron.efa.doctor.host import Host

LEVELS = ("ok", "info", "skipped", "warn", "fail")
"""In rising order. `skipped`: the check could not look, and says why."""


@dataclass(frozen=True)
class Finding:
    """What one check found in one place: what, where, why it matters and what to do about it."""

    level: str
    what: str
    where: str = ""
    """File, device, variable or link; the node is added by whoever gathers nodes."""
    why: str = ""
    do: str = ""
    check: str = ""
    node: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class Skip(Exception):
    """The check could not look, for this reason."""


def ok(what: str, where: str = "") -> Finding:
    """All is well, and this is the evidence."""
    return Finding("ok", what, where)


def info(what: str, where: str = "", why: str = "", do: str = "") -> Finding:
    """Worth knowing, nothing to be done."""
    return Finding("info", what, where, why, do)


def warn(what: str, where: str = "", *, why: str, do: str) -> Finding:
    """The job will probably run, worse than it could."""
    return Finding("warn", what, where, why, do)


def fail(what: str, where: str = "", *, why: str, do: str) -> Finding:
    """The job will fail, hang, or run at a fraction of its speed."""
    return Finding("fail", what, where, why, do)


type Run = Callable[["Host", "Context"], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """`covers`: ids of the failures in docs/doctor.md that it sees."""

    id: str
    title: str
    covers: tuple[str, ...]
    run: Run
    once: bool = False
    """It asks about the cluster: one node is enough, and a login node will do."""
    login: bool = False
    """It asks about the job, so that it makes sense on a login node too."""


_FIRST = ("devices", "fabric", "gpus", "limits", "plugin", "versions")
_checks: dict[str, Check] = {}


def check(
    id: str,
    title: str,
    covers: Iterable[str] = (),
    *,
    once: bool = False,
    login: bool = False,
) -> Callable[[Run], Run]:
    """Register a check; see `Check` for what its words mean."""

    def register(run: Run) -> Run:
        if id in _checks:
            raise ValueError(f"two checks are called {id}")
        _checks[id] = Check(id, title, tuple(covers), run, once, once or login)
        return run

    return register


def checks() -> list[Check]:
    """All checks: what others rest on first, then by their modules' names."""
    from megatron.efa.doctor import checks as package

    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    for module in sorted(names, key=lambda name: (name not in _FIRST, name)):
        importlib.import_module(f"{package.__name__}.{module}")
    return list(_checks.values())


def findings(one: Check, host: "Host", context: "Context") -> list[Finding]:
    """What `one` finds on `host`: never nothing, and never an exception."""
    try:
        found = list(one.run(host, context))
        if not found:
            raise RuntimeError("it said nothing")
    except Skip as reason:
        found = [Finding("skipped", str(reason))]
    except Exception as error:
        from megatron.efa.errors import EfaError

        if isinstance(error, EfaError):
            found = [Finding("skipped", str(error))]
        else:  # a defect of the check must not hide behind "skipped"
            what = f"the check itself broke: {type(error).__name__}: {error}"
            do = f"mend the check {one.id} in megatron/efa/doctor/checks, or report this line"
            found = [warn(what, why="what it looks for is not known", do=do)]
    return [replace(finding, check=one.id) for finding in found]


def examine(
    host: "Host",
    context: "Context",
    *,
    once: bool = True,
    login: bool = False,
    only: Iterable[str] = (),
) -> Iterator[Finding]:
    """Run all checks (or those with ids `only`) on `host`.

    `once`: those of the cluster as well; `login`: the host is a login node, whose own devices and
    limits say nothing about the nodes.
    """
    wanted = set(only)
    for one in checks():
        fits = (once or not one.once) and (one.login or not login)
        if fits and (not wanted or one.id in wanted):
            yield from findings(one, host, context)


def from_dict(said: dict[str, Any]) -> Finding:
    """The finding that `as_dict` wrote down."""
    return Finding(**said)
