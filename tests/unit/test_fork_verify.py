"""`fork verify` and the check at start: nobody trains on another upstream by accident."""

import argparse
import hashlib
import os
import subprocess
import sys
import time

import pytest
from fork_checkout import LOOP, SERIES, UPSTREAM, A, B, Checkout

import megatron
from megatron.efa.errors import EfaError
from megatron.efa.fork import verify_at_start
from megatron.efa.fork.cli import run
from megatron.efa.fork.layout import Layout
from megatron.efa.fork.status import status
from megatron.efa.fork.verify import verify

SYNC = r"`megatron-efa fork sync`$"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    checkout = Checkout(tmp_path, monkeypatch)
    checkout.sync()
    return checkout


def refused(checkout, says):
    """Both forms of the check refuse; `status` says it in a word, without failing."""
    for check in (verify_at_start, verify):
        with pytest.raises(EfaError, match=says):
            check(checkout.layout)
    return status(checkout.layout)


def test_base_and_series_pass(checkout):
    verify_at_start(checkout.layout)
    verify(checkout.layout, full=True)
    assert "clean: exactly base + series" in status(checkout.layout)


def test_no_tree_at_all(checkout):
    for part in ("core", "training"):
        (checkout.layout.namespace / part).rename(checkout.root / part)
    assert "absent" in refused(checkout, "holds no upstream yet: lay it out by " + SYNC)


def test_a_tree_that_sync_did_not_make(checkout):
    (checkout.layout.state / "manifest.json").unlink()
    said = refused(checkout, "is no patched upstream that this checkout laid out: .* " + SYNC)
    assert "not laid out" in said


def test_a_manifest_that_cannot_be_read_is_as_none(checkout):
    (checkout.layout.state / "manifest.json").write_text('{"format": 1')
    refused(checkout, "is no patched upstream")


@pytest.mark.parametrize("path", [A, B, "megatron/core/notes.md"])
def test_a_hand_edited_file(checkout, path):
    (checkout.root / path).write_bytes(checkout.tree()[path] + b"# mine\n")
    said = refused(checkout, rf"{path} differs .*`megatron-efa fork export`.*sync --force`")
    assert f"changed {path}" in said


def test_an_edit_of_equal_size_right_after_the_sync(checkout):
    checkout.edit(LOOP, "loop3 = 3", "loop3 = 4")
    refused(checkout, f"{LOOP} differs")


def test_a_file_that_was_added(checkout):
    (checkout.root / "megatron/core/mine.py").touch()
    assert "added   megatron/core/mine.py" in refused(checkout, "mine.py differs")


def test_a_file_that_is_gone(checkout):
    (checkout.root / LOOP).unlink()
    assert f"missing {LOOP}" in refused(checkout, f"{LOOP} differs")


def test_a_directory_in_place_of_a_file(checkout):
    (checkout.root / LOOP).unlink()
    (checkout.root / LOOP).symlink_to(checkout.root)
    refused(checkout, f"{LOOP} differs")


def test_a_series_that_changed_since_the_sync(checkout):
    checkout.write_series(SERIES[:1])
    assert "stale" in refused(checkout, "was made from another base or series than .* " + SYNC)


def test_another_base_than_that_of_the_sync(checkout):
    checkout.release("1.1", {**UPSTREAM, B: b"new = 1\n"})
    pin = checkout.layout.pin_file.read_text().replace('version = "1.0"', 'version = "1.1"')
    checkout.layout.pin_file.write_text(pin)
    refused(checkout, "was made from another base or series")


def test_a_change_of_a_header_does_not_make_the_tree_stale(checkout):
    file = checkout.layout.patches / SERIES[0].name
    file.write_bytes(file.read_bytes().replace(b"Why: w", b"Why: because"))
    verify(checkout.layout)


def test_helpers_compiled_for_another_python(tmp_path, monkeypatch):
    helpers = "megatron/core/h.cpython-27-x86_64-linux-gnu.so"
    checkout = Checkout(tmp_path, monkeypatch)
    checkout.release("1.0", {**UPSTREAM, helpers: b"ELF"}, known=False)
    checkout.sync()
    said = refused(checkout, "are for another Python: fetch those of this one by " + SYNC)
    assert "for another Python" in said


def test_touched_but_equal_files_pass(checkout):
    os.utime(checkout.root / A)
    verify_at_start(checkout.layout)


def forge(checkout, path, data):
    """Change a file behind the back of the manifest's stat."""
    before = (checkout.root / path).stat()
    (checkout.root / path).write_bytes(data)
    os.utime(checkout.root / path, ns=(before.st_mtime_ns, before.st_mtime_ns))


def test_full_sees_what_a_stat_cannot(checkout):
    forge(checkout, LOOP, checkout.tree()[LOOP].replace(b"loop3 = 3", b"loop3 = 4"))
    verify_at_start(checkout.layout)
    with pytest.raises(EfaError, match=f"{LOOP} differs"):
        verify(checkout.layout, full=True)


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        (LOOP, b"loop3 = 3", b"loop3 = 4", "without the series is not megatron-core 1.0"),
        (A, b"first2 = 2", b"first2 = 3", "does not hold the lines of the series"),
        (A, b"a4 = 4", b"a4 = 5", "without the series is not megatron-core 1.0"),
    ],
)
def test_full_does_not_trust_the_manifest_either(checkout, path, old, new, says):
    manifest = checkout.layout.state / "manifest.json"
    forge(checkout, path, checkout.tree()[path].replace(old, new))
    ours = hashlib.sha256(checkout.tree()[path].replace(new, old)).hexdigest()
    theirs = hashlib.sha256(checkout.tree()[path]).hexdigest()
    manifest.write_text(manifest.read_text().replace(ours, theirs))
    verify(checkout.layout)
    with pytest.raises(EfaError, match=says + r".*`megatron-efa fork sync --force`"):
        verify(checkout.layout, full=True)


def test_an_init_file_in_the_namespace(checkout):
    (checkout.layout.namespace / "__init__.py").touch()
    refused(checkout, r"__init__.py hides the rest of the namespace package: delete it")


def test_an_installed_megatron_core_first_on_the_path(checkout, tmp_path, monkeypatch):
    other = tmp_path / "site-packages" / "megatron"
    (other / "training").mkdir(parents=True)
    (other / "training" / "__init__.py").touch()
    monkeypatch.setattr(megatron, "__path__", [*megatron.__path__, str(other)])
    verify_at_start(checkout.layout)
    monkeypatch.setattr(megatron, "__path__", megatron.__path__[::-1])
    said = rf"Python would import megatron.training from {other}/training instead of .*PYTHONPATH="
    refused(checkout, said)


def test_an_installed_megatron_core_first_on_the_real_path(checkout, tmp_path):
    """The same with a real interpreter, whose path decides."""
    (checkout.layout.namespace / "efa").symlink_to(Layout.of_this_checkout().namespace / "efa")
    other = tmp_path / "site-packages"
    (other / "megatron" / "core").mkdir(parents=True)
    (other / "megatron" / "core" / "__init__.py").touch()
    code = (
        "from pathlib import Path; from megatron.efa.fork.layout import Layout\n"
        "from megatron.efa.fork import verify_at_start\n"
        f"verify_at_start(Layout(Path({str(checkout.root)!r})))"
    )

    def start(*path):
        env = {**os.environ, "PYTHONPATH": ":".join(map(str, path))}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path
        )

    assert start(checkout.root, other).returncode == 0
    assert "Python would import megatron.core from" in start(other, checkout.root).stderr


def test_unfilled_headers_fail_verify_but_not_a_start(checkout):
    file = checkout.layout.patches / SERIES[1].name
    file.write_bytes(file.read_bytes().replace(b"Upstream: u", b"Upstream:"))
    verify_at_start(checkout.layout)
    with pytest.raises(EfaError, match="the header field `Upstream:` is empty, fill it in"):
        verify(checkout.layout)
    assert "the header field `Upstream:` is empty" in status(checkout.layout)


def test_status_lists_series_and_budget(checkout):
    said = status(checkout.layout)
    assert "base    megatron-core 1.0" in said
    assert "2 of 15 patches, 5 of 150 inserted lines" in said
    assert "0002  second  +2" in said
    assert B in said


def test_the_check_at_start_imports_neither_torch_nor_upstream():
    code = (
        "import sys; from megatron.efa.fork import verify_at_start; verify_at_start()\n"
        "heavy = {'torch', 'numpy', 'packaging', 'megatron.core', 'megatron.training'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Layout.of_this_checkout().root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_check_at_start_takes_milliseconds():
    verify_at_start()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        verify_at_start()
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.05


def test_the_command_prints_its_time(checkout, capsys):
    assert run(argparse.Namespace(action="verify", full=False), checkout.layout) == 0
    assert "ms)" in capsys.readouterr().out
