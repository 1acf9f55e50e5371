"""What there is: base, series and budget, state of the tree."""

from megatron.efa.errors import EfaError
from megatron.efa.fork import state
from megatron.efa.fork.layout import Layout
from megatron.efa.fork.series import MAX_LINES, MAX_PATCHES, check_rules, digest, load
from megatron.efa.fork.state import Kind, Tree

_MENDS = {
    Kind.INTERRUPTED: "a sync was killed half-way; `megatron-efa fork sync` finishes it",
    Kind.ABSENT: "absent; `megatron-efa fork sync` lays it out",
    Kind.UNKNOWN: "not laid out by `megatron-efa fork sync`",
    Kind.STALE: "stale: base or series changed; `megatron-efa fork sync` brings it up to date",
    Kind.OTHER_PYTHON: "for another Python; `megatron-efa fork sync` fetches its compiled helpers",
    Kind.CLEAN: "clean: exactly base + series",
}


def status(layout: Layout) -> str:
    """A report of several lines for people."""
    pin, series = layout.pin(), load(layout.patches)
    wanted = digest(pin.sha256, series)
    out = [f"base    {pin.distribution} {pin.version}, content {pin.sha256[:16]}"]
    total = sum(patch.inserted for patch in series)
    out.append(
        f"series  {len(series)} of {MAX_PATCHES} patches, {total} of {MAX_LINES} inserted lines"
    )
    for patch in series:
        out.append(f"  {patch.number:04d}  {patch.title}  +{patch.inserted}")
        out.extend(f"        {path}" for path in patch.paths)
    try:
        check_rules(layout.root, series)
    except EfaError as error:
        out.append(f"  but {error}")
    out.extend(_tree_lines(state.inspect(layout, wanted)))
    if (layout.state / "rebase").exists():
        out.append("rebase  under way; `megatron-efa fork rebase --continue` or `--abort`")
    return "\n".join(out)


def _tree_lines(tree: Tree) -> list[str]:
    if tree.kind is not Kind.DIRTY:
        return [f"tree    {_MENDS[tree.kind]}"]
    out = ["tree    dirty; `megatron-efa fork export` keeps edits, `sync --force` discards them"]
    for word, paths in (
        ("changed", tree.changed),
        ("added", tree.added),
        ("missing", tree.missing),
    ):
        out.extend(f"  {word:7} {path}" for path in paths)
    return out
