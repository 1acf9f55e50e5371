"""Get a release of upstream: from a file, a directory, the cache, or the package index."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from megatron.efa.errors import EfaError
from megatron.efa.fork.layout import PREFIXES, Pin, content_hash


@dataclass(frozen=True)
class Base:
    """A release of upstream in memory: path relative to the repository's root -> bytes."""

    version: str
    files: dict[str, bytes]

    @cached_property
    def sha256(self) -> str:
        """The content hash described in `patches/upstream.toml`."""
        return content_hash(
            {path: hashlib.sha256(data).digest() for path, data in self.files.items()}
        )


def cache_directory() -> Path:
    """Where fetched wheels are kept for the next clone."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "megatron-efa" / "wheels"


def obtain(
    pin: Pin, version: str, *, wheel: Path | None = None, directory: Path | None = None
) -> Base:
    """The release `version`, with its content hash checked if the pin knows one for it.

    Args:
        wheel: take this file and nothing else.
        directory: take the fitting wheel of this directory and nothing else.

    Raises:
        EfaError: the wheel cannot be had, is none of `version` for this Python, or has another
            hash.
    """
    cache = cache_directory()
    if wheel is None and directory is None:
        cached = find(pin, version, cache)
        if cached and (base := _sound(pin, version, cached)):
            return base
        return _download(pin, version, cache)
    if wheel is None:
        wheel = find(pin, version, directory)
        if wheel is None:
            raise EfaError(
                f"{directory} holds no wheel of {pin.distribution} {version} for this Python, "
                "so fetch one with `pip download --no-deps` or leave --from out"
            )
    elif not _fits(pin, version, wheel.name):
        raise EfaError(
            f"{wheel} is no wheel of {pin.distribution} {version} for this Python "
            f"({sys.version_info.major}.{sys.version_info.minor}), so give one that is"
        )
    base = read(wheel, version)
    check_hash(pin, base, str(wheel))
    _keep(wheel, cache)
    return base


def check_hash(pin: Pin, base: Base, origin: str) -> None:
    """Raise an EfaError if the pin knows another content hash for this version."""
    known = pin.hashes.get(base.version)
    if known and known != base.sha256:
        raise EfaError(
            f"{origin} has content hash {base.sha256[:16]} where patches/upstream.toml says "
            f"{known[:16]} for {pin.distribution} {base.version}: it is not the release that was "
            "pinned, so use another index or wheel (--wheel FILE)"
        )


def read(wheel: Path, version: str) -> Base:
    """Read the two packages out of a wheel.

    Raises:
        EfaError: the file is no sound wheel, or has no megatron/core or megatron/training.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = {
                name: archive.read(name)
                for name in archive.namelist()
                if name.startswith(PREFIXES) and not name.endswith(("/", ".pyc"))
            }
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise EfaError(f"{wheel} cannot be read ({error}): give a sound wheel") from None
    if any(".." in name.split("/") for name in files):
        raise EfaError(f"{wheel} holds paths with `..`: it was tampered with, so do not use it")
    missing = [prefix for prefix in PREFIXES if not any(n.startswith(prefix) for n in files)]
    if missing:
        raise EfaError(f"{wheel} has no {missing[0]}: it is no wheel of Megatron, give another one")
    return Base(version, files)


def _fits(pin: Pin, version: str, name: str) -> bool:
    try:
        distribution, found, _, tags = parse_wheel_filename(name)
        wanted = Version(version)
    except (InvalidWheelFilename, InvalidVersion):
        return False
    same = distribution == canonicalize_name(pin.distribution) and found == wanted
    return same and not tags.isdisjoint(sys_tags())


def find(pin: Pin, version: str, directory: Path) -> Path | None:
    """The wheel of `version` for this Python in a directory, if there is one."""
    wheels = sorted(directory.glob("*.whl")) if directory.is_dir() else []
    return next((wheel for wheel in wheels if _fits(pin, version, wheel.name)), None)


def _sound(pin: Pin, version: str, cached: Path) -> Base | None:
    """The cached release, or None if the cache is damaged: then it is fetched again."""
    try:
        base = read(cached, version)
        check_hash(pin, base, str(cached))
    except EfaError:
        return None
    return base


def _keep(wheel: Path, cache: Path) -> None:
    """Copy a checked wheel into the cache; a home that cannot be written is no reason to stop."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as aside:
            os.replace(shutil.copy(wheel, aside), cache / wheel.name)
    except OSError as error:
        print(f"megatron-efa: {wheel.name} is not kept in {cache}: {error}", file=sys.stderr)


def _download(pin: Pin, version: str, cache: Path) -> Base:
    requirement = f"{pin.distribution}=={version}"
    with tempfile.TemporaryDirectory(prefix="megatron-efa-") as aside:
        # The log holds pip's debug lines whatever its configuration says; only they tell an index
        # that does not answer from one without the release.
        log = Path(aside) / "log"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--log", str(log), "--dest", aside, requirement]
        environment = {"PIP_RETRIES": "2", **os.environ}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        fetched = find(pin, version, Path(aside))
        if done.returncode or fetched is None:
            reason = _reason(log.read_text() if log.exists() else "", done.stderr)
            raise EfaError(
                f"{requirement} cannot be fetched from the package index ({reason}): check the "
                "network and PIP_INDEX_URL, or bring a wheel (--wheel FILE, --from DIR)"
            )
        base = read(fetched, version)
        check_hash(pin, base, f"the wheel of {requirement} from the package index")
        _keep(fetched, cache)
    return base


def _reason(log: str, errors: str) -> str:
    """In one line why pip failed."""
    if re.search("Could not fetch URL .*connection error", log):
        return "the index does not answer"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (named or lines or ["pip gives no reason"])[-1].rstrip(".")
