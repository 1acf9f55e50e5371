"""How a patch may look, and that the real series keeps to it."""

import subprocess
import sys
from pathlib import Path

import pytest
from fork_checkout import HEADER, SERIES, UPSTREAM, A, B, hunk, patch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.efa.errors import EfaError
from megatron.efa.fork import lines
from megatron.efa.fork.layout import Layout
from megatron.efa.fork.series import check_rules, digest, load, parse

REAL = Layout.of_this_checkout()
GOOD = patch(1, "good", hunk(A, 3, "x = 1", "y = 2"), hunk(A, 5, "z = 3")).render().decode()


def test_the_real_series_keeps_the_rules():
    series = load(REAL.patches)
    assert series
    check_rules(REAL.root, series)


def test_the_real_pin_is_rendered_byte_for_byte():
    assert REAL.pin().render() == REAL.pin_file.read_text()


@pytest.mark.parametrize("path", sorted(REAL.patches.glob("*.patch")), ids=lambda path: path.stem)
def test_a_real_patch_is_rendered_byte_for_byte(path):
    assert parse(path.name, path.read_bytes()).render() == path.read_bytes()


def test_compiled_helpers_are_not_compiled_again():
    # The packages around the function are stand-ins: importing them for real takes a torch.
    code = (
        "import subprocess, sys, types\n"
        "for name in ('megatron.core', 'megatron.core.datasets', 'megatron.core.utils'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [name.replace('.', '/')]\n"
        "sys.modules['megatron.core.utils'].log_single_rank = print\n"
        "from megatron.core.datasets.utils import compile_helpers\n"
        "subprocess.run = lambda *a, **k: sys.exit('make was run')\n"
        "compile_helpers()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REAL.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_header_fields_may_go_on_over_lines():
    assert parse("0001-good.patch", GOOD.encode()).fields["How"] == "h and on"


def test_a_header_may_hold_any_prose_before_the_diff():
    text = GOOD.replace("\ndiff --git", "\nA paragraph - with a dash\n--- and a rule\n\ndiff --git")
    assert parse("0001-good.patch", text.encode()).render().decode() == text


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("@@ -3,0 +4,2 @@\n", "@@ -3,1 +4,2 @@\n-a3 = 3\n", ":11: the hunk removes upstream lines"),
        ("@@ -3,0 +4,2 @@\n", "@@ -3 +4,2 @@\n", ":11: the hunk removes upstream lines"),
        ("@@ -3,0 +4,2 @@", "@@ -3,0 +4,3 @@", ":11: the hunk does not consist of the 3"),
        ("@@ -3,0 +4,2 @@", "@@ -3,0 +5,2 @@", ":11: the hunk's line numbers do not follow"),
        ("@@ -5,0 +8 @@", "@@ -2,0 +5 @@", ":14: the hunk's line numbers do not follow"),
        ("+y = 2\n", "+y = 2\n a4 = 4\n", ":14: this is no line of an insert-only diff"),
        ("+z = 3\n", "+z = 3\n\\ No newline at end of file\n", ":16: this is no line"),
        ("megatron/core/a.py", "megatron/efa/cli.py", "lies outside megatron/core"),
        ("megatron/core/a.py", "megatron/core/../efa/cli.py", "lies outside megatron/core"),
        ("+++ b/megatron/core/a.py", "+++ b/megatron/core/c.py", "renames, creates or deletes"),
        ("--- a/megatron/core/a.py", "--- /dev/null", "this is no line of an insert-only diff"),
        ("+z = 3\n", "+z = 3", "the last line has no newline"),
        (GOOD[GOOD.index("diff") :], "", "there is no diff after the header"),
        (GOOD[GOOD.index("@@") :], "", "the diff inserts nothing"),
    ],
)
def test_a_patch_of_another_form_is_refused_with_its_place(old, new, says):
    assert old in GOOD
    with pytest.raises(EfaError) as error:
        parse("0001-good.patch", GOOD.replace(old, new).encode())
    assert "patches/0001-good.patch" in str(error.value)
    assert says in str(error.value)


@pytest.mark.parametrize("name", ["1-good.patch", "0001-Good.patch", "0001_good.patch", "x.patch"])
def test_a_patch_of_another_name_is_refused(name):
    with pytest.raises(EfaError, match=r"a patch is called NNNN-"):
        parse(name, GOOD.encode())


def write(directory: Path, series) -> Path:
    (directory / "tests").mkdir(exist_ok=True)
    (directory / "tests" / "test_hooks.py").touch()
    for one in series:
        (directory / one.name).write_bytes(one.render())
    return directory


@pytest.mark.parametrize("numbers", [(2,), (1, 3), (1, 1)])
def test_numbers_have_no_gap_and_no_twin(tmp_path, numbers):
    series = [patch(n, f"p{i}", hunk(A, 1, "x = 1")) for i, n in enumerate(numbers)]
    with pytest.raises(EfaError, match="the series should go on with 000"):
        load(write(tmp_path, series))


@pytest.mark.parametrize("name", ["Why", "How", "Upstream", "Removal", "Test"])
@pytest.mark.parametrize("fate", ["empty", "absent"])
def test_every_header_field_must_be_filled(tmp_path, name, fate):
    kept = [text for text in HEADER.splitlines() if not text.startswith((f"{name}:", "  "))]
    header = "\n".join(kept + ([f"{name}:  "] if fate == "empty" else [])) + "\n\n"
    text = GOOD.replace(HEADER, header)
    write(tmp_path, [])
    with pytest.raises(EfaError, match=rf"0001-good.patch: the header field `{name}:` is empty"):
        check_rules(tmp_path, [parse("0001-good.patch", text.encode())])


def test_the_test_that_a_patch_names_must_exist(tmp_path):
    write(tmp_path, [])
    gone = GOOD.replace("tests/test_hooks.py", "tests/test_gone.py")
    with pytest.raises(EfaError, match=r"tests/test_gone.py is none"):
        check_rules(tmp_path, [parse("0001-good.patch", gone.encode())])


@pytest.mark.parametrize(("count", "length"), [(15, 10), (1, 150)])
def test_the_budget_may_be_used_up_but_not_passed(tmp_path, count, length):
    write(tmp_path, [])
    series = [patch(n, "p", hunk(A, n, *["x = 1"] * length)) for n in range(1, count + 1)]
    check_rules(tmp_path, series)
    series.append(patch(count + 1, "p", hunk(B, 1, "x = 1")))
    with pytest.raises(EfaError, match="but the budget is 15 and 150"):
        check_rules(tmp_path, series)


def test_the_digest_is_that_of_the_inserted_lines_only():
    retold = [parse(p.name, p.render().replace(b"Why: w", b"Why: other")) for p in SERIES]
    moved = [SERIES[0], patch(2, "second", hunk(A, 8, "second = 1"), hunk(B, 0, "top = 1"))]
    assert digest("base", retold) == digest("base", SERIES)
    assert len({digest("base", SERIES), digest("base", moved), digest("other", SERIES)}) == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (hunk("megatron/core/gone.py", 1, "x"), r"the release has no megatron/core/gone.py"),
        (hunk(A, 13, "x"), r"after line 13 of megatron/core/a.py: the file has 12 lines only"),
    ],
)
def test_a_hunk_whose_place_is_not_there_does_not_apply(wrong, says):
    with pytest.raises(EfaError, match=says):
        lines.apply([patch(1, "q", wrong)], UPSTREAM.get)


def test_a_hunk_whose_neighbours_have_changed_does_not_apply():
    files = lines.apply(SERIES, UPSTREAM.get)
    marked = patch(2, "second", *lines.hunks(A, files[A], 2))
    grown = patch(1, "first", hunk(A, 3, "first1 = 1", "first2 = 2", "first3 = 3"))
    with pytest.raises(EfaError, match="the lines beside it are not those"):
        lines.apply([grown, marked], UPSTREAM.get)


# Few different lines: equal neighbours are where positions are ambiguous.
text_lines = st.lists(st.sampled_from([b"a\n", b"b\n", b"\n", b"  \r\n", b"\x0c\n", b"+\n"]))


@st.composite
def series_on_upstream(draw):
    """A small upstream and a series made by inserting at random places."""
    paths = ("megatron/core/p.py", "megatron/training/q.py")
    base = {path: b"".join(draw(text_lines)) for path in paths}
    files = {path: [(text, 0) for text in lines.split(data)] for path, data in base.items()}
    count = draw(st.integers(1, 4))
    for number in range(1, count + 1):
        inserts = st.tuples(st.sampled_from(paths), st.integers(0, 30), text_lines.filter(len))
        for path, place, new in draw(st.lists(inserts, min_size=1, max_size=3)):
            at = min(place, len(files[path]))
            files[path][at:at] = [(text, number) for text in new]
    made = [
        patch(n, "p", *(h for path in paths for h in lines.hunks(path, files[path], n)))
        for n in range(1, count + 1)
    ]
    return base, made, files


@given(series_on_upstream())
def test_a_series_applies_and_is_written_down_again_byte_for_byte(case):
    base, series, files = case
    again = [parse(p.name, p.render()) for p in series]
    assert again == series
    applied = lines.apply(again, base.get)
    for path, file in applied.items():
        assert lines.join(file) == lines.join(files[path])
        assert lines.without_series(series, path, lines.join(file)) == base[path]
    for one in again:
        hunks = [
            h for path in sorted(applied) for h in lines.hunks(path, applied[path], one.number)
        ]
        assert parse(one.name, one.render()).hunks == tuple(hunks)


def git_apply(directory: Path, base: dict[str, bytes], series) -> dict[str, bytes]:
    for path, data in base.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    subprocess.run(["git", "init", "--quiet"], cwd=directory, check=True)
    for one in series:
        (directory / one.name).write_bytes(one.render())
        command = ["git", "-c", "core.autocrlf=false", "apply", "--unidiff-zero", one.name]
        subprocess.run(command, cwd=directory, check=True)
    return {path: (directory / path).read_bytes() for path in base}


def test_git_applies_a_series_to_the_same_bytes(tmp_path_factory):
    @settings(max_examples=40, deadline=None)
    @given(series_on_upstream())
    def check(case):
        base, series, files = case
        result = git_apply(tmp_path_factory.mktemp("git"), base, series)
        assert result == {path: lines.join(file) for path, file in files.items()}

    check()
