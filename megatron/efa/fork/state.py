"""What `sync` laid out, and whether it is still so.

The manifest works as git's index does: size, modification time and hash of every file. A file whose
stat is as recorded is taken as unchanged; any other is hashed. `sync` sets modification times two
seconds back, so that an edit right after it cannot hide behind an equal time.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.fork.layout import COMPILED, PARTS, Layout, files_below

FORMAT = 1


class Kind(Enum):
    """The state of the tree under `megatron/`, the first that holds in this order."""

    INTERRUPTED = "interrupted"  # a sync was killed between its renames
    ABSENT = "absent"
    UNKNOWN = "unknown"  # there is a tree, but sync did not make it
    DIRTY = "dirty"  # files differ from what sync wrote
    STALE = "stale"  # base or series changed since
    OTHER_PYTHON = "other python"  # its compiled helpers cannot be loaded by this interpreter
    CLEAN = "clean"


@dataclass(frozen=True)
class Tree:
    """State of the tree, with the paths (relative to the root, sorted) in which it is dirty."""

    kind: Kind
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[str, ...]:
        return tuple(sorted(self.changed + self.added + self.missing))


@dataclass(frozen=True)
class Manifest:
    """What sync wrote: release, digest of base + series, (size, mtime_ns, SHA-256) of each path."""

    version: str
    digest: str
    files: dict[str, tuple[int, int, str]]

    def write(self, path: Path) -> None:
        """Write aside, then rename: a reader sees the old or the new one, never half of it."""
        text = json.dumps(
            {"format": FORMAT, "version": self.version, "digest": self.digest, "files": self.files}
        )
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix="manifest-")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(aside, 0o644)
        os.replace(aside, path)


def manifest_path(layout: Layout) -> Path:
    return layout.state / "manifest.json"


def ready_path(layout: Layout) -> Path:
    """The tree of a sync that is complete and only waits for its renames."""
    return layout.state / "ready"


def read_manifest(layout: Layout) -> Manifest | None:
    """The manifest, or None if there is none that this version can read."""
    try:
        data = json.loads(manifest_path(layout).read_bytes())
        if data["format"] != FORMAT:
            return None
        return Manifest(data["version"], data["digest"], data["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hash_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file; empty if it cannot be read (a link put in its place, say)."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def survey(namespace: Path) -> dict[str, os.stat_result]:
    """Stats of all files below the parts of a `megatron` directory, by `megatron/part/...` path."""
    found: dict[str, os.stat_result] = {}
    for part in PARTS:
        if (namespace / part).is_dir():
            for path, stat in files_below(namespace / part):
                found[f"megatron/{part}/{path}"] = stat
    return found


def record(namespace: Path, version: str, digest: str) -> Manifest:
    """A manifest of the parts that lie below `namespace` now (the project's, or one set aside)."""
    files = {}
    for path, stat in survey(namespace).items():
        data = namespace.joinpath(*path.split("/")[1:])
        files[path] = (stat.st_size, stat.st_mtime_ns, hash_file(data))
    return Manifest(version, digest, files)


def inspect(layout: Layout, digest: str, *, full: bool = False) -> Tree:
    """Compare the tree with its manifest, and the manifest with `digest` of base + series.

    Args:
        full: hash every file, whatever its stat says.
    """
    if ready_path(layout).exists():
        return Tree(Kind.INTERRUPTED)
    there = [part for part in PARTS if (layout.namespace / part).exists()]
    if not there:
        return Tree(Kind.ABSENT)
    manifest = read_manifest(layout)
    if manifest is None:
        return Tree(Kind.UNKNOWN)
    found = survey(layout.namespace)
    changed = []
    for path, stat in found.items():
        known = manifest.files.get(path)
        if known is None:
            continue
        same = not full and stat.st_size == known[0] and stat.st_mtime_ns == known[1]
        if not same and hash_file(layout.root / path) != known[2]:
            changed.append(path)
    added = sorted(found.keys() - manifest.files.keys())
    missing = sorted(manifest.files.keys() - found.keys())
    if changed or added or missing:
        return Tree(Kind.DIRTY, tuple(sorted(changed)), tuple(added), tuple(missing))
    if manifest.digest != digest:
        return Tree(Kind.STALE)
    if not _loadable(manifest):
        return Tree(Kind.OTHER_PYTHON)
    return Tree(Kind.CLEAN)


def refusal_of_edits(layout: Layout, tree: Tree) -> EfaError:
    """The error for a tree with edits."""
    paths = tree.differing
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return EfaError(
        f"{layout.root / paths[0]}{more} differs from what base and series make: keep the edit by "
        "`megatron-efa fork export`, or discard it by `megatron-efa fork sync --force`"
    )


def _loadable(manifest: Manifest) -> bool:
    names = [path.rsplit("/", 1)[1] for path in manifest.files if path.endswith(COMPILED)]
    return not names or any("." + n.split(".", 1)[1] in EXTENSION_SUFFIXES for n in names)
