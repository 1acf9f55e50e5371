"""A checkout with a small upstream, so that a test of the fork takes milliseconds."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

import megatron
from megatron.efa.fork.layout import Layout, Pin
from megatron.efa.fork.series import Hunk, Patch
from megatron.efa.fork.sync import sync
from megatron.efa.fork.wheel import Base

A = "megatron/core/a.py"
B = "megatron/core/deep/b.py"
LOOP = "megatron/training/loop.py"
HEADER = "Why: w\nHow: h\n  and on\nUpstream: u\nRemoval: r\nTest: tests/test_hooks.py::test_it\n\n"


def numbered(name: str, count: int = 12) -> bytes:
    """A Python file of `count` lines, all different."""
    return "".join(f"{name}{i} = {i}\n" for i in range(1, count + 1)).encode()


UPSTREAM = {
    "megatron/core/__init__.py": b"",
    A: numbered("a"),
    B: numbered("b"),
    "megatron/core/notes.md": b"notes\n",
    "megatron/training/__init__.py": b"",
    LOOP: numbered("loop"),
}


def write_wheel(directory: Path, version: str, files: dict[str, bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"megatron_core-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        info = f"megatron_core-{version}.dist-info"
        about = f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def hunk(path: str, after: int, *texts: str) -> Hunk:
    return Hunk(path, after, tuple(f"{text}\n".encode() for text in texts))


def patch(number: int, title: str, *hunks: Hunk) -> Patch:
    return Patch(number, title, HEADER, hunks)


SERIES = [
    patch(1, "first", hunk(A, 3, "first1 = 1", "first2 = 2"), hunk(LOOP, 12, "tail = 1")),
    patch(2, "second", hunk(B, 0, "top = 1"), hunk(A, 9, "second = 1")),
]


class Checkout:
    """A checkout in `root` on release 1.0, wheels in `wheels`, and an empty cache of its own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = tmp_path / "checkout"
        self.wheels = tmp_path / "wheels"
        self.layout = Layout(self.root)
        self.layout.patches.mkdir(parents=True)
        (self.root / "tests").mkdir()
        (self.root / "tests" / "test_hooks.py").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        # A package index that does not answer: nothing in these tests may come from a real one.
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(megatron, "__path__", [str(self.layout.namespace)])
        for name in ("megatron.core", "megatron.training"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        self.release("1.0", UPSTREAM)
        self.write_series(SERIES)

    def release(self, version: str, files: dict[str, bytes], known: bool = True) -> Path:
        """Publish a release in `wheels`; the pin stays on the first one."""
        wheel = write_wheel(self.wheels, version, files)
        pin = self.layout.pin() if self.layout.pin_file.exists() else Pin("megatron-core", version)
        if known:
            hashes = {**pin.hashes, version: Base(version, files).sha256}
            pin = Pin(pin.distribution, pin.version, hashes)
        self.layout.pin_file.write_text(pin.render())
        return wheel

    def write_series(self, series: list[Patch]) -> None:
        for old in self.layout.patches.glob("*.patch"):
            old.unlink()
        for one in series:
            (self.layout.patches / one.name).write_bytes(one.render())

    def sync(self, **options: object) -> str:
        return sync(self.layout, directory=self.wheels, **options)

    def tree(self) -> dict[str, bytes]:
        """All files of the tree but bytecode."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for part in ("core", "training")
            for path in (self.layout.namespace / part).rglob("*")
            if path.is_file()
        }

    def patches(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.layout.patches.iterdir()}

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace the one occurrence of `old`, as an editor would."""
        file = self.root / path
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))


def dies_at_rename(number: int, work) -> bool:
    """Run `work` in a child that is killed (SIGKILL) right before its rename `number` (from 1).

    Returns whether it was killed; False means that it made fewer renames and ended well.
    """
    child = os.fork()
    if child == 0:
        left = number
        real = os.rename

        def rename(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), 9)
            return real(*arguments, **options)

        os.rename = rename
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)
