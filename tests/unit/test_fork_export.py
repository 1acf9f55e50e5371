"""`fork export`: edits in the tree become the series, and nothing else changes."""

import pytest
from fork_checkout import LOOP, SERIES, UPSTREAM, A, B, Checkout, hunk, patch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.efa.errors import EfaError
from megatron.efa.fork import align, lines
from megatron.efa.fork.export import drop, export
from megatron.efa.fork.series import check_rules, load
from megatron.efa.fork.verify import verify


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    checkout = Checkout(tmp_path, monkeypatch)
    checkout.sync()
    assert export(checkout.layout) == ["0001-first.patch", "0002-second.patch"]  # adds `beside`
    return checkout


def exported(checkout, **options):
    """Export, and check what must always hold; return the series."""
    tree = checkout.tree()
    names = export(checkout.layout, **options)
    assert checkout.tree() == tree
    again = checkout.patches()
    assert export(checkout.layout) == []
    assert checkout.patches() == again
    for path in tree:
        checkout.root.joinpath(path).unlink()
    checkout.sync()
    assert checkout.tree() == tree
    return names, load(checkout.layout.patches)


def refused(checkout, says, **options):
    patches, tree = checkout.patches(), checkout.tree()
    with pytest.raises(EfaError, match=says):
        export(checkout.layout, **options)
    assert (checkout.patches(), checkout.tree()) == (patches, tree)


def test_a_clean_tree_changes_no_byte(checkout):
    before = checkout.patches()
    assert export(checkout.layout) == []
    assert checkout.patches() == before


@pytest.mark.parametrize(
    ("old", "new", "now"),
    [
        ("first1 = 1\n", "first1 = 1\nmid = 1\n", ["first1 = 1", "mid = 1", "first2 = 2"]),
        ("first1 = 1\n", "head = 1\nfirst1 = 1\n", ["head = 1", "first1 = 1", "first2 = 2"]),
        ("first2 = 2\n", "first2 = 2\nend = 1\n", ["first1 = 1", "first2 = 2", "end = 1"]),
        ("first2 = 2\n", "first2 = 3\n", ["first1 = 1", "first2 = 3"]),
        ("first2 = 2\n", "", ["first1 = 1"]),
        ("first1 = 1\nfirst2 = 2\n", "other = 1\n", ["other = 1"]),
    ],
)
def test_edits_in_and_beside_a_patch_go_to_it(checkout, old, new, now):
    checkout.edit(A, old, new)
    names, series = exported(checkout)
    assert "0001-first.patch" in names
    assert [x.decode().strip() for x in series[0].hunks[0].lines] == now


def test_later_patches_keep_their_place_when_an_earlier_one_grows(checkout):
    checkout.edit(A, "first2 = 2\n", "first2 = 2\nfirst3 = 3\n")
    names, series = exported(checkout)
    assert names == ["0001-first.patch", "0002-second.patch"]
    assert [h.after for h in series[1].hunks if h.path == A] == [10]


def test_lines_beside_no_patch_need_a_word(checkout):
    checkout.edit(B, "b6 = 6\n", "b6 = 6\nalone = 1\n")
    refused(checkout, rf"{B}:8: the inserted line stands beside no patch: .*--into NNNN.*--new")


def test_lines_beside_no_patch_go_where_one_says(checkout):
    checkout.edit(B, "b6 = 6\n", "b6 = 6\nalone = 1\n")
    names, series = exported(checkout, into=1)
    assert "0001-first.patch" in names
    assert hunk(B, 6, "alone = 1").lines in [h.lines for h in series[0].hunks]


def test_a_new_patch_must_have_its_header_filled(checkout):
    checkout.edit(B, "b6 = 6\n", "b6 = 6\nalone = 1\n")
    names, series = exported(checkout, new="Two-level: all-to-all!")
    assert names == ["0003-two-level-all-to-all.patch"]
    assert [h.lines for h in series[2].hunks] == [(b"alone = 1\n",)]
    file = checkout.layout.patches / names[0]
    for name in ("Why", "How", "Upstream", "Removal", "Test"):
        with pytest.raises(EfaError, match=rf"{names[0]}: the header field `{name}:` is empty"):
            verify(checkout.layout)
        value = "tests/test_hooks.py" if name == "Test" else "said"
        file.write_text(file.read_text().replace(f"{name}:\n", f"{name}: {value}\n"))
    verify(checkout.layout, full=True)


def test_a_patch_may_insert_at_both_ends_of_a_file_and_into_an_empty_one(checkout):
    init = checkout.root / "megatron/core/__init__.py"
    init.write_text("empty = 0\n")
    loop = checkout.root / LOOP
    loop.write_text("top = 1\n" + loop.read_text() + "more = 1\n")
    _, series = exported(checkout, new="ends")
    assert [(h.path, h.after) for h in series[2].hunks] == [
        ("megatron/core/__init__.py", 0),
        (LOOP, 0),
    ]
    assert series[0].hunks[-1].lines == (b"tail = 1\n", b"more = 1\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [("a5 = 5\n", ""), ("a5 = 5\n", "a5 = 6\n"), ("a5 = 5\na6 = 6\n", "a6 = 6\na5 = 5\n")],
)
def test_a_changed_upstream_line_is_refused_by_file_and_line(checkout, old, new):
    checkout.edit(A, old, new)
    refused(checkout, rf"{A}: line 5|6 of upstream \('a5 = 5'|'a6 = 6'\) is changed or gone")


def test_a_file_that_was_added_is_refused(checkout):
    (checkout.root / "megatron/core/mine.py").write_text("mine = 1\n")
    refused(checkout, r"mine.py is no file of upstream: move it to megatron/efa")


def test_a_file_that_is_gone_is_refused(checkout):
    (checkout.root / LOOP).unlink()
    refused(checkout, r"loop.py is gone or rebuilt")


def test_a_missing_newline_at_the_end_is_refused(checkout):
    (checkout.root / A).write_bytes(checkout.tree()[A] + b"x = 1")
    refused(checkout, r"a.py:16: the last line has no newline")


def test_lines_that_do_not_compile_are_refused(checkout):
    checkout.edit(A, "first1 = 1\n", "first1 = (\n")
    refused(checkout, rf"{A}:4 does not compile")


def test_a_patch_that_lost_its_last_line_is_not_dropped_in_silence(checkout):
    checkout.edit(A, "second = 1\n", "")
    checkout.edit(B, "top = 1\n", "")
    refused(checkout, r"0002-second.patch has no line in the tree any more: .*--drop 2")


def test_edits_are_not_mistaken_when_the_series_has_changed_as_well(checkout):
    checkout.edit(A, "first1 = 1\n", "first1 = 3\n")
    checkout.write_series(SERIES[:1])
    refused(checkout, r"patches has changed since .* was laid out")


def test_without_a_tree_there_is_nothing_to_export(checkout):
    (checkout.layout.state / "manifest.json").unlink()
    refused(checkout, "holds no tree to export: lay it out by `megatron-efa fork sync`")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"into": 3}, "there is no patch 0003"),
        ({"into": 0}, "there is no patch 0000"),
        ({"new": "!"}, "a title needs letters"),
        ({"new": "nothing"}, r"there is no line for the new patch 0003-nothing"),
    ],
)
def test_an_impossible_target_is_refused(checkout, options, says):
    refused(checkout, says, **options)


def test_dropping_a_patch_takes_its_lines_out_and_closes_the_gap(checkout):
    names = drop(checkout.layout, 1)
    assert names == ["0001-second.patch", "0001-first.patch", "0002-second.patch"]
    with pytest.raises(EfaError, match="bring it up to date by"):
        verify(checkout.layout)
    checkout.sync()
    assert checkout.tree()[LOOP] == UPSTREAM[LOOP]
    assert b"second = 1\n" in checkout.tree()[A]
    verify(checkout.layout, full=True)
    check_rules(checkout.root, load(checkout.layout.patches))


def test_dropping_needs_a_clean_tree_and_a_patch(checkout):
    with pytest.raises(EfaError, match="there is no patch 0009"):
        drop(checkout.layout, 9)
    checkout.edit(A, "first1 = 1\n", "first1 = 3\n")
    with pytest.raises(EfaError, match="keep the edit by `megatron-efa fork export`"):
        drop(checkout.layout, 1)


def test_a_base_line_that_also_stands_in_a_patch_is_not_taken_for_lost():
    """A common diff would keep the patch's `x` and call upstream's one removed."""
    old = [(b"x\n", 1), (b"y\n", 1), (b"x\n", 0), (b"z\n", 0)]
    assert align.own(old, [b"x\n", b"z\n"]) == [(b"x\n", 0), (b"z\n", 0)]


few = st.lists(st.sampled_from([b"a\n", b"b\n", b"\n"]), max_size=12)


insertions = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([b"a\n", b"c\n"])))
changes = st.lists(st.tuples(st.integers(0, 24), st.sampled_from([b"a\n", b"d\n", None])))


@given(few, insertions, changes)
def test_any_edit_that_keeps_the_base_is_understood(base, patched, edits):
    old = [(text, 0) for text in base]
    for place, text in patched:
        old.insert(min(place, len(old)), (text, 1))
    new = list(old)
    for place, text in edits:
        if text is not None:
            new.insert(min(place, len(new)), (text, 2))
        elif place < len(new) and new[place][1] != 0:
            del new[place]
    owned = align.own(old, [text for text, _ in new])
    assert [text for text, _ in owned] == [text for text, _ in new]
    assert [text for text, owner in owned if owner == 0] == base
    assert {owner for _, owner in owned} <= {0, 1, align.NEW}


@given(base=few.filter(len), place=st.integers(0, 12), run=few.filter(len))
def test_an_insertion_among_equal_lines_is_found_where_it_was_written(base, place, run):
    at = min(place, len(base))
    new = base[:at] + run + base[at:]
    owned = align.own([(text, 0) for text in base], new, {tuple(run)})
    runs = "".join("n" if owner == align.NEW else "-" for _, owner in owned).split("-")
    found = [text for text, owner in owned if owner == align.NEW]
    assert [text for text, owner in owned if owner == 0] == base
    if len([one for one in runs if one]) == 1:
        assert found == run


hooks = st.tuples(st.sampled_from([A, B, LOOP]), st.integers(0, 12), st.integers(1, 3))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(hooks, min_size=1, max_size=6))
def test_any_series_comes_back_byte_for_byte(checkout, places):
    files = {path: [(text, 0) for text in lines.split(UPSTREAM[path])] for path in (A, B, LOOP)}
    for number, (path, place, count) in enumerate(places, start=1):
        new = [(f"p{number}_{i} = {i}\n".encode(), number) for i in range(count)]
        files[path][place:place] = new
    series = [
        patch(n, f"p{n}", *(h for path in files for h in lines.hunks(path, files[path], n)))
        for n in range(1, len(places) + 1)
    ]
    checkout.write_series(series)
    checkout.sync(force=True)
    before = checkout.patches()
    assert export(checkout.layout) == []
    assert checkout.patches() == before
    assert checkout.tree() == UPSTREAM | {path: lines.join(file) for path, file in files.items()}
