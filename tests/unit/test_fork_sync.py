"""`fork sync`: the tree becomes base + series, whole or not at all."""

import os
import zipfile
from pathlib import Path

import pytest
from fork_checkout import LOOP, SERIES, UPSTREAM, A, Checkout, dies_at_rename, hunk, patch

from megatron.efa.errors import EfaError
from megatron.efa.fork.sync import locked, sync
from megatron.efa.fork.verify import verify
from megatron.efa.fork.wheel import cache_directory


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    return Checkout(tmp_path, monkeypatch)


def no_leftovers(checkout):
    return {path.name for path in checkout.layout.state.iterdir()} <= {"lock", "manifest.json"}


def test_the_tree_is_base_and_series(checkout):
    assert checkout.sync() == "megatron/ is now megatron-core 1.0 + 2 patches"
    tree = checkout.tree()
    assert tree.keys() == UPSTREAM.keys()
    assert tree[A].splitlines()[3:5] == [b"first1 = 1", b"first2 = 2"]
    assert tree["megatron/core/notes.md"] == b"notes\n"
    assert no_leftovers(checkout)


def test_a_clean_tree_is_left_alone(checkout):
    checkout.sync()
    before = (checkout.root / A).stat()
    assert checkout.sync().startswith("nothing to do")
    assert (checkout.root / A).stat() == before


def test_a_second_clone_needs_no_index_and_no_wheel(checkout):
    checkout.sync()
    for part in ("core", "training"):
        (checkout.layout.namespace / part).rename(checkout.root / f"old-{part}")
    assert "is now" in sync(checkout.layout)
    verify(checkout.layout, full=True)


def test_a_damaged_cache_is_not_trusted(checkout):
    checkout.sync()
    (cached,) = cache_directory().iterdir()
    cached.write_bytes(cached.read_bytes()[:100])
    (checkout.layout.state / "manifest.json").unlink()
    with pytest.raises(EfaError, match="the index does not answer"):
        sync(checkout.layout, force=True)
    checkout.sync(force=True)
    sync(checkout.layout)


def test_without_network_the_error_says_how_to_bring_a_wheel(checkout):
    with pytest.raises(EfaError) as error:
        sync(checkout.layout)
    assert "megatron-core==1.0 cannot be fetched" in str(error.value)
    assert "the index does not answer" in str(error.value)
    assert "--wheel FILE" in str(error.value)
    assert checkout.tree() == {}


def test_an_index_without_the_release_is_told_from_no_index(checkout, monkeypatch, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(empty))
    with pytest.raises(EfaError, match=r"No matching distribution found for megatron-core==1\.0"):
        sync(checkout.layout)


def test_the_release_comes_from_the_index_pip_is_told_of(checkout, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(checkout.wheels))
    assert "is now" in sync(checkout.layout)


def test_another_content_than_the_pinned_one_is_refused(checkout):
    checkout.sync()
    before = checkout.tree()
    checkout.write_series(SERIES[:1])
    wheel = checkout.release("1.0", {**UPSTREAM, A: b"evil = 1\n"}, known=False)
    with pytest.raises(EfaError, match=r"has content hash .* where patches/upstream.toml says"):
        sync(checkout.layout, wheel=wheel)
    assert checkout.tree() == before


def test_compiled_helpers_may_differ_between_platforms(checkout):
    checkout.release("1.0", {**UPSTREAM, "megatron/core/h.so": b"\x7fELF"}, known=False)
    checkout.sync()
    assert checkout.tree()["megatron/core/h.so"] == b"\x7fELF"
    verify(checkout.layout, full=True)


@pytest.mark.parametrize(
    "name",
    [
        "megatron_core-2.0-py3-none-any.whl",
        "other-1.0-py3-none-any.whl",
        "megatron_core-1.0-cp27-cp27m-win32.whl",
        "x.whl",
    ],
)
def test_a_wheel_of_something_else_is_refused(checkout, name):
    (right,) = checkout.wheels.iterdir()
    wheel = right.rename(checkout.wheels / name)
    with pytest.raises(EfaError, match=r"is no wheel of megatron-core 1\.0 for this"):
        sync(checkout.layout, wheel=wheel)
    with pytest.raises(EfaError, match=r"holds no wheel of megatron-core 1\.0 for this"):
        checkout.sync()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"not a zip", "cannot be read"),
        ({"megatron/core/__init__.py": b""}, "has no megatron/training/"),
        ({**UPSTREAM, "megatron/core/../../../x": b""}, "holds paths with `..`"),
    ],
)
def test_a_wheel_that_is_not_sound_is_refused(checkout, content, says):
    wheel = checkout.wheels / "megatron_core-1.0-py3-none-any.whl"
    if isinstance(content, bytes):
        wheel.write_bytes(content)
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    with pytest.raises(EfaError, match=says):
        checkout.sync()
    assert checkout.tree() == {}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (patch(1, "p", hunk(A, 99, "x = 1")), "0001-p.patch does not apply after line 99"),
        (patch(1, "p", hunk("megatron/core/no.py", 1, "x = 1")), "the release has no"),
        (patch(1, "p", hunk(A, 2, "x = (")), r"megatron/core/a.py:3 does not compile"),
    ],
)
def test_a_patch_that_does_not_fit_leaves_the_tree_as_it_was(checkout, wrong, says):
    checkout.sync()
    before = checkout.tree()
    checkout.write_series([wrong])
    with pytest.raises(EfaError, match=says):
        checkout.sync()
    assert checkout.tree() == before
    assert no_leftovers(checkout)


def test_edits_are_not_overwritten_unless_told_so_and_then_kept_aside(checkout):
    checkout.sync()
    checkout.edit(LOOP, "loop3 = 3\n", "loop3 = 4\n")
    (checkout.root / "megatron/core/mine.py").write_text("mine = 1\n")
    edited = checkout.tree()
    with pytest.raises(EfaError, match=r"megatron/core/mine.py and 1 more differs.*fork export"):
        checkout.sync()
    assert checkout.tree() == edited
    checkout.sync(force=True)
    assert checkout.tree().keys() == UPSTREAM.keys()
    assert (checkout.layout.state / "discarded" / LOOP).read_bytes() == edited[LOOP]
    assert (checkout.layout.state / "discarded/megatron/core/mine.py").exists()


def test_a_deleted_file_is_put_back_without_force(checkout):
    checkout.sync()
    before = checkout.tree()
    (checkout.root / LOOP).unlink()
    checkout.sync()
    assert checkout.tree() == before


def test_bytecode_is_no_edit_and_goes_with_the_old_tree(checkout):
    checkout.sync()
    cache = checkout.layout.namespace / "core" / "__pycache__"
    cache.mkdir()
    (cache / "a.pyc").write_bytes(b"old")
    checkout.write_series(SERIES[:1])
    assert "1 patch" in checkout.sync()
    assert not cache.exists()


def test_a_tree_of_unknown_origin_is_not_overwritten_unless_told_so(checkout):
    checkout.sync()
    (checkout.layout.state / "manifest.json").unlink()
    with pytest.raises(EfaError, match=r"was not laid out by .*fork sync --force"):
        checkout.sync()
    checkout.sync(force=True)
    verify(checkout.layout)


def test_an_unpatched_release_put_there_by_hand_is_taken_over(checkout):
    for path, data in UPSTREAM.items():
        (checkout.root / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout.root / path).write_bytes(data)
    checkout.sync()
    verify(checkout.layout, full=True)


def test_two_at_once_do_not_get_in_each_others_way(checkout):
    with locked(checkout.layout), pytest.raises(EfaError, match="wait until it has ended"):
        checkout.sync()


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_killed_at_any_rename_the_next_sync_finishes(checkout, number):
    checkout.write_series(SERIES[:1])
    checkout.sync()
    old = checkout.tree()
    checkout.write_series(SERIES)
    assert dies_at_rename(number, checkout.sync)
    if number > 1:  # rename 1 is the point of no return
        with pytest.raises(EfaError, match=r"was killed half-way: finish it by `megatron-efa fork"):
            verify(checkout.layout)
    else:
        assert checkout.tree() == old
    assert ("interrupted" in checkout.sync()) == (number > 1)
    verify(checkout.layout, full=True)
    assert no_leftovers(checkout)


def test_six_is_the_number_of_renames(checkout):
    checkout.write_series(SERIES[:1])
    checkout.sync()
    checkout.write_series(SERIES)
    assert not dies_at_rename(7, checkout.sync)


def test_a_sync_that_was_killed_is_finished_even_if_the_series_has_changed_since(checkout):
    checkout.sync()
    checkout.write_series(SERIES[:1])
    assert dies_at_rename(3, checkout.sync)
    checkout.write_series(SERIES)
    checkout.sync()
    verify(checkout.layout, full=True)
    assert "2 patches" in checkout.sync()


def test_a_home_that_cannot_be_written_costs_the_cache_only(checkout, monkeypatch, capsys):
    blocked = Path(os.environ["XDG_CACHE_HOME"])
    blocked.write_text("a file where the cache should be")
    checkout.sync()
    assert "is not kept in" in capsys.readouterr().err
    verify(checkout.layout)


@pytest.mark.parametrize("text", ["", "version = '1'", "distribution = 3\n[sha256]\n", "= ="])
def test_a_pin_that_cannot_be_read_is_an_error_that_names_it(checkout, text):
    checkout.layout.pin_file.write_text(text)
    with pytest.raises(EfaError, match=r"patches/upstream.toml cannot be used"):
        checkout.sync()


def test_outside_a_checkout_the_error_says_so(checkout):
    checkout.layout.pin_file.unlink()
    with pytest.raises(EfaError, match=r"upstream.toml is missing: the fork works in a checkout"):
        checkout.sync()
