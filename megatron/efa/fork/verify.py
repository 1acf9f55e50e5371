"""Is the tree exactly base + series, and is it the one that Python would import?"""

import hashlib
import importlib.util
import os
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork import lines, state
from megatron.efa.fork.layout import PARTS, Layout, content_hash
from megatron.efa.fork.series import Patch, check_rules, digest, load
from megatron.efa.fork.state import Kind, refusal_of_edits


def verify_at_start(layout: Layout | None = None) -> None:
    """Refuse to start on anything but the patched upstream; takes milliseconds, imports no torch.

    Raises:
        EfaError: the tree is absent, half swapped, edited, or of another base or series; or Python
            would import another `megatron.core`. Each says which command mends it.
    """
    layout = layout or Layout.of_this_checkout()
    _check_tree(layout, load(layout.patches), full=False)
    check_imports(layout)


def verify(layout: Layout, *, full: bool = False) -> None:
    """What `verify_at_start` checks, and that the series keeps its rules.

    Args:
        full: hash every file, and take the series out of the patched ones again: what is left must
            have the content hash of the pinned release, whatever the manifest says.
    """
    series = load(layout.patches)
    _check_tree(layout, series, full=full)
    if full:
        _check_base(layout, series)
    check_imports(layout)
    check_rules(layout.root, series)


def _check_tree(layout: Layout, series: list[Patch], *, full: bool) -> None:
    tree = state.inspect(layout, digest(layout.pin().sha256, series), full=full)
    if tree.kind is Kind.CLEAN:
        return
    if tree.kind is Kind.DIRTY:
        raise refusal_of_edits(layout, tree)
    where = layout.namespace
    raise EfaError(
        {
            Kind.INTERRUPTED: f"a sync of {where} was killed half-way: finish it by",
            Kind.ABSENT: f"{where} holds no upstream yet: lay it out by",
            Kind.UNKNOWN: f"{where / PARTS[0]} is no patched upstream that this checkout laid out: "
            "move it away and run",
            Kind.STALE: f"{where} was made from another base or series than {layout.patches} "
            "holds: bring it up to date by",
            Kind.OTHER_PYTHON: f"the compiled helpers in {where} are for another Python: fetch "
            "those of this one by",
        }[tree.kind]
        + " `megatron-efa fork sync`"
    )


def _check_base(layout: Layout, series: list[Patch]) -> None:
    hashes: dict[str, bytes] = {}
    patched = {path for patch in series for path in patch.paths}
    for path in state.survey(layout.namespace):
        data: bytes | None = (layout.root / path).read_bytes()
        if path in patched:
            data = lines.without_series(series, path, data)
            if data is None:
                raise EfaError(
                    f"{layout.root / path} does not hold the lines of the series where they "
                    "belong: lay it out anew by `megatron-efa fork sync --force`"
                )
        hashes[path] = hashlib.sha256(data).digest()
    pin = layout.pin()
    if content_hash(hashes) != pin.sha256:
        raise EfaError(
            f"{layout.namespace} without the series is not {pin.distribution} {pin.version}: "
            "lay it out anew by `megatron-efa fork sync --force`"
        )


def check_imports(layout: Layout) -> None:
    """Check that `import megatron.core` takes this tree, without importing it.

    `megatron` is a namespace package: the first directory on its path that has a `core` wins, and
    images come with a megatron-core in site-packages.

    Raises:
        EfaError: naming the tree that would be imported instead.
    """
    init = layout.namespace / "__init__.py"
    if os.path.lexists(init):
        raise EfaError(
            f"{init} hides the rest of the namespace package: delete it, then check by "
            "`megatron-efa fork verify`"
        )
    for part in PARTS:
        name = f"megatron.{part}"
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin) if spec and spec.origin else None
        wanted = layout.namespace / part / "__init__.py"
        if origin is None or not origin.samefile(wanted):
            other = origin.parent if origin else "nothing"
            raise EfaError(
                f"Python would import {name} from {other} instead of {wanted.parent}: put the "
                f"checkout first (PYTHONPATH={layout.root}) or uninstall the other megatron-core, "
                "then check by `megatron-efa fork verify`"
            )
