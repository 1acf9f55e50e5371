"""Turn edits in the tree back into the series.

Every line of the tree has an owner: upstream, or a patch. Changed and new lines next to those of a
patch go to that patch; lines that stand alone need a word from the engineer: `--into NNNN` or
`--new TITLE`. Upstream's own lines must all be there still. What comes out makes exactly this tree.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork import align, lines, state
from megatron.efa.fork.align import NEW
from megatron.efa.fork.layout import COMPILED, Layout, Pin
from megatron.efa.fork.lines import Lines
from megatron.efa.fork.series import FIELDS, Patch, digest, load
from megatron.efa.fork.state import Kind, Tree, refusal_of_edits
from megatron.efa.fork.sync import check_compiles, locked
from megatron.efa.fork.wheel import obtain


def export(layout: Layout, *, new: str | None = None, into: int | None = None) -> list[str]:
    """Rewrite `patches/` so that base + series is the tree as it is; return the names written.

    Args:
        new: title of a new patch for lines that stand beside no patch.
        into: number of the patch that such lines go to.

    Raises:
        EfaError: an upstream line is changed, a line stands alone, a file was added, ...: then
            nothing is written.
    """
    with locked(layout):
        pin, series, tree = _tree_of_series(layout)
        base = obtain(pin, pin.version)
        owned = lines.apply(series, base.files.get)
        if into is not None and not 1 <= into <= len(series):
            raise EfaError(f"there is no patch {into:04d}: see `megatron-efa fork status`")
        if new is not None:
            into = len(series) + 1
            series.append(Patch(into, _slug(new), template(), ()))
        for path in tree.changed:
            file = owned.get(path) or [(text, 0) for text in lines.split(base.files[path])]
            owned[path] = _own(layout.root / path, path, file, into)
        result = [_write_down(patch, owned) for patch in series]
        check_compiles({path: lines.join(file) for path, file in owned.items()})
        names = store(layout.patches, result)
        manifest = state.record(layout.namespace, pin.version, digest(pin.sha256, result))
        manifest.write(state.manifest_path(layout))
    return names


def drop(layout: Layout, number: int) -> list[str]:
    """Take patch `number` out of `patches/` and renumber the later ones; return the names written.

    The tree is then stale, and `sync` takes the lines out of it.
    """
    with locked(layout):
        pin, series, tree = _tree_of_series(layout)
        if tree.changed:
            raise refusal_of_edits(layout, tree)
        if not 1 <= number <= len(series):
            raise EfaError(f"there is no patch {number:04d}: see `megatron-efa fork status`")
        base = obtain(pin, pin.version)
        owned = {
            path: [(text, owner) for text, owner in file if owner != number]
            for path, file in lines.apply(series, base.files.get).items()
        }
        kept = [_write_down(patch, owned) for patch in series if patch.number != number]
        return store(layout.patches, [replace(p, number=i) for i, p in enumerate(kept, start=1)])


def template() -> str:
    """The header of a new patch; `verify` and the tests fail until each field is filled."""
    return "".join(f"{name}:\n" for name in FIELDS) + "\n"


def store(directory: Path, series: Iterable[Patch]) -> list[str]:
    """Make `directory` hold exactly this series; return the names written or removed.

    Each file is written aside and renamed; one whose bytes are right already is left alone.
    """
    changed = []
    wanted = {patch.name: patch.render() for patch in series}
    for name, data in wanted.items():
        path = directory / name
        if not path.exists() or path.read_bytes() != data:
            aside = directory / f".{name}.new"
            aside.write_bytes(data)
            aside.replace(path)
            changed.append(name)
    for path in sorted(directory.glob("*.patch")):
        if path.name not in wanted:
            path.unlink()
            changed.append(path.name)
    return changed


def _tree_of_series(layout: Layout) -> tuple[Pin, list[Patch], Tree]:
    """Pin, series, and the tree made from just these, perhaps with edits that can be exported."""
    pin, series = layout.pin(), load(layout.patches)
    wanted = digest(pin.sha256, series)
    tree, manifest = state.inspect(layout, wanted), state.read_manifest(layout)
    if manifest is None or tree.kind in (Kind.INTERRUPTED, Kind.ABSENT):
        raise EfaError(
            f"{layout.namespace} holds no tree to export: lay it out by `megatron-efa fork sync`"
        )
    if manifest.digest != wanted:
        # Whose a line is can be told only by the series that the tree was made from.
        raise EfaError(
            f"{layout.patches} has changed since {layout.namespace} was laid out: take the change "
            "by `megatron-efa fork sync`, or restore it with git and then run "
            "`megatron-efa fork export`"
        )
    changed_binary = [path for path in tree.changed if path.endswith(COMPILED)]
    if tree.missing or changed_binary:
        raise EfaError(
            f"{layout.root / (list(tree.missing) + changed_binary)[0]} is gone or rebuilt, but a "
            "patch may only insert lines: put it back by `megatron-efa fork sync --force`"
        )
    if tree.added:
        raise EfaError(
            f"{layout.root / tree.added[0]} is no file of upstream: move it to megatron/efa, let a "
            "line in upstream import it, then run `megatron-efa fork export`"
        )
    return pin, series, tree


def _own(file: Path, path: str, old: Lines, target: int | None) -> Lines:
    new = lines.split(file.read_bytes())
    if new and not new[-1].endswith(b"\n"):
        raise EfaError(f"{file}:{len(new)}: the last line has no newline: add one, export again")
    try:
        owned = align.own(old, new)
    except align.BaseLineLost as lost:
        text = lost.text.decode(errors="replace").strip()
        raise EfaError(
            f"{path}: line {lost.number} of upstream ({text!r}) is changed or gone, but a patch "
            "may only insert: put it back and return early, rebind a name or add an `elif` instead"
        ) from None
    return _adopt(path, owned, target)


def _adopt(path: str, owned: Lines, target: int | None) -> Lines:
    """Give runs of new lines to the patch before or else behind them, or else to `target`."""
    result: Lines = []
    at = 0
    while at < len(owned):
        text, owner = owned[at]
        if owner != NEW:
            result.append((text, owner))
            at += 1
            continue
        end = at
        while end < len(owned) and owned[end][1] == NEW:
            end += 1
        before = result[-1][1] if result else 0
        behind = owned[end][1] if end < len(owned) else 0
        number = before or behind or target
        if number is None:
            raise EfaError(
                f"{path}:{at + 1}: the inserted line stands beside no patch: say where it belongs "
                "by `megatron-efa fork export --into NNNN` or `--new 'TITLE'`"
            )
        result += [(text, number) for text, _ in owned[at:end]]
        at = end
    return result


def _write_down(patch: Patch, owned: dict[str, Lines]) -> Patch:
    result = lines.rewritten(patch, owned)
    if not result.hunks and not patch.hunks:
        raise EfaError(
            f"there is no line for the new patch {patch.name}: insert one that stands beside no "
            "other patch, then run `megatron-efa fork export` again"
        )
    if not result.hunks:
        raise EfaError(
            f"patches/{patch.name} has no line in the tree any more: put one back, or take the "
            "patch out by `megatron-efa fork sync --force` and then "
            f"`megatron-efa fork export --drop {patch.number}`"
        )
    return result


def _slug(title: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    if not slug:
        raise EfaError(f"--new {title!r}: a title needs letters or digits, give it some")
    return slug
