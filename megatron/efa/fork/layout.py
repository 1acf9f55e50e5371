"""Where everything of the fork lies, computed from the root of a checkout."""

import hashlib
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megatron.efa.errors import EfaError

PARTS = ("core", "training")
PREFIXES = tuple(f"megatron/{part}/" for part in PARTS)
# Compiled helpers differ between platforms and Python versions; all else is the same in each wheel.
COMPILED = (".so", ".pyd", ".dylib")

_PIN_TEXT = """\
# The release of upstream that the patches in this directory apply to, and the content hashes of
# the releases that were looked at. A hash is independent of platform and Python version: it is
#   find megatron/core megatron/training -type f ! -name '*.so' ! -path '*/__pycache__/*' |
#       LC_ALL=C sort | xargs sha256sum | sha256sum
# in an unpacked wheel. Written by `megatron-efa fork rebase`; do not change it by hand.
distribution = "{distribution}"
version = "{version}"

[sha256]
{hashes}"""


@dataclass(frozen=True)
class Pin:
    """The pinned release and the content hashes (version -> hexadecimal SHA-256)."""

    distribution: str
    version: str
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Content hash of the pinned release."""
        return self.hashes[self.version]

    def render(self) -> str:
        """The text of `patches/upstream.toml`; reading it gives this pin again."""
        hashes = "".join(f'"{version}" = "{self.hashes[version]}"\n' for version in self.hashes)
        return _PIN_TEXT.format(distribution=self.distribution, version=self.version, hashes=hashes)


@dataclass(frozen=True)
class Layout:
    """Paths of one checkout; `state` is git-ignored and holds what `sync` and `rebase` remember."""

    root: Path

    @classmethod
    def of_this_checkout(cls) -> "Layout":
        """The checkout this file lies in."""
        return cls(Path(__file__).resolve().parents[3])

    @property
    def namespace(self) -> Path:
        return self.root / "megatron"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def pin_file(self) -> Path:
        return self.patches / "upstream.toml"

    @property
    def state(self) -> Path:
        return self.namespace / ".fork"

    def pin(self) -> Pin:
        """Read `patches/upstream.toml`.

        Raises:
            EfaError: the file is absent, is not TOML, or lacks a key or the pinned version's hash.
        """
        try:
            data = tomllib.loads(self.pin_file.read_text())
            pin = Pin(data["distribution"], data["version"], dict(data["sha256"]))
            _ = pin.sha256
        except FileNotFoundError:
            raise EfaError(
                f"{self.pin_file} is missing: the fork works in a checkout of the repository only "
                "(install it with `pip install -e .`, or start from the checkout's directory)"
            ) from None
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise EfaError(
                f"{self.pin_file} cannot be used ({type(error).__name__}: {error}): "
                "restore it with `git checkout patches/upstream.toml`"
            ) from None
        return pin


def files_below(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Paths (relative to `directory`, with `/`) and stats of all files but bytecode, unsorted."""
    pending = [("", str(directory))]
    while pending:
        prefix, name = pending.pop()
        with os.scandir(name) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "__pycache__":
                        pending.append((f"{prefix}{entry.name}/", entry.path))
                else:
                    yield prefix + entry.name, entry.stat(follow_symlinks=False)


def content_hash(files: dict[str, bytes]) -> str:
    """SHA-256 over the `sha256sum` lines of `files` (path -> SHA-256 digest) but compiled ones.

    Paths are relative to the repository's root (`megatron/core/...`) and taken in byte order.
    """
    total = hashlib.sha256()
    for path in sorted(files, key=str.encode):
        if not path.endswith(COMPILED):
            total.update(f"{files[path].hex()}  {path}\n".encode())
    return total.hexdigest()
