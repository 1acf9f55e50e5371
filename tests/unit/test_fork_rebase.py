"""`fork rebase`: the series moves to another release by a merge, or stops where one must decide."""

import os

import pytest
from fork_checkout import LOOP, SERIES, UPSTREAM, A, B, Checkout, dies_at_rename, hunk, patch

from megatron.efa.errors import EfaError
from megatron.efa.fork import rebase
from megatron.efa.fork.export import export
from megatron.efa.fork.series import load
from megatron.efa.fork.status import status
from megatron.efa.fork.verify import verify

HEAD = b"# a new licence\n# of three\n# lines\n"


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    checkout = Checkout(tmp_path, monkeypatch)
    checkout.sync()
    export(checkout.layout)
    return checkout


def start(checkout, version="1.1"):
    return rebase.start(checkout.layout, version, directory=checkout.wheels)


def report(checkout):
    return (checkout.layout.state / "rebase-report.md").read_text()


def row(checkout, number, path):
    """The cells after the file name in the report's line for a patch and a file."""
    lines = [x for x in report(checkout).splitlines() if x.startswith(f"| {number}") and path in x]
    (line,) = lines
    return [cell.strip() for cell in line.split("|")[3:-1]]


def snapshot(checkout):
    return checkout.tree(), checkout.patches()


def stopped(checkout, upstream):
    """Publish 1.1 and start a rebase that stops; return the scratch repository."""
    checkout.release("1.1", {**UPSTREAM, **upstream})
    before = snapshot(checkout)
    with pytest.raises(EfaError, match=r"conflicts with 1.1 in .*--continue` \(or `--abort`\)"):
        start(checkout)
    assert snapshot(checkout) == before
    return checkout.layout.state / "rebase" / "repository"


CONFLICT = {A: UPSTREAM[A].replace(b"a3 = 3\na4 = 4\n", b"a3 = 30\na4 = 40\n")}
SOLVED = CONFLICT[A].replace(b"a3 = 30\n", b"a3 = 30\nfirst1 = 1\nfirst2 = 2\n")


def test_an_unchanged_neighbourhood_moves_and_everything_follows(checkout, capsys):
    checkout.release("1.1", {**UPSTREAM, A: HEAD + UPSTREAM[A], "megatron/core/new.py": b"n = 1\n"})
    said = start(checkout)
    assert "moved 2 of 2 patches to megatron-core 1.1" in capsys.readouterr().out
    assert said == "megatron/ is now megatron-core 1.1 + 2 patches"
    assert checkout.layout.pin().version == "1.1"
    assert checkout.tree()[A].startswith(HEAD)
    assert "megatron/core/new.py" in checkout.tree()
    verify(checkout.layout, full=True)
    assert [h.after for h in load(checkout.layout.patches)[0].hunks] == [6, 12]
    assert row(checkout, "0001", A) == ["+3 -0", "3", "3 -> 6", "moved", "yes"]
    assert row(checkout, "0001", LOOP) == ["unchanged", "", "12 -> 12", "clean", "yes"]


def test_there_and_back_is_the_same_series_byte_for_byte(checkout):
    checkout.release("1.1", {**UPSTREAM, A: HEAD + UPSTREAM[A]})
    before = snapshot(checkout)
    start(checkout)
    start(checkout, "1.0")
    assert snapshot(checkout) == before


@pytest.mark.parametrize(
    ("old", "new", "nearest"),
    [
        (b"a1 = 1\n", b"a1 = 10\n", "2"),
        (b"a5 = 5\n", b"", "1"),
        (b"a12 = 12\n", b"a12 = 12\na13 = 13\n", "9"),
    ],
)
def test_a_change_near_a_clean_merge_is_pointed_out(checkout, old, new, nearest):
    assert old in UPSTREAM[A]
    checkout.release("1.1", {**UPSTREAM, A: UPSTREAM[A].replace(old, new)})
    start(checkout)
    assert row(checkout, "0001", A)[1:] == [nearest, "3 -> 3", "clean", "yes"]


@pytest.mark.parametrize("path", [B, LOOP])
def test_lines_at_an_end_of_a_file_that_upstream_grew_there_are_a_conflict(checkout, path):
    """Which of the two comes first nobody can know."""
    grown = b"x = 1\n" + UPSTREAM[B] if path == B else UPSTREAM[LOOP] + b"x = 1\n"
    stopped(checkout, {path: grown})


def test_a_conflict_stops_and_touches_nothing(checkout):
    repository = stopped(checkout, CONFLICT)
    assert b"<<<<<<< " in (repository / A).read_bytes()
    assert row(checkout, "0001", A) == ["+2 -2", "0", "3 -> ?", "conflict, to be resolved", ""]
    assert row(checkout, "0002", B)[3] == "not reached"
    assert "Not finished: patch 0001" in report(checkout)
    assert "rebase  under way" in status(checkout.layout)
    verify(checkout.layout, full=True)


def test_a_resolved_conflict_goes_on_to_the_end(checkout):
    repository = stopped(checkout, CONFLICT)
    (repository / A).write_bytes(SOLVED)
    rebase.go_on(checkout.layout)
    verify(checkout.layout, full=True)
    assert b"a3 = 30\nfirst1 = 1\nfirst2 = 2\na4 = 40\n" in checkout.tree()[A]
    assert b"second = 1\n" in checkout.tree()[A]
    assert row(checkout, "0001", A) == ["+2 -2", "0", "3 -> 3", "conflict", "yes"]
    assert not repository.exists()
    assert load(checkout.layout.patches)[0].fields == SERIES[0].fields


def test_two_conflicts_stop_twice(checkout):
    upstream = {**CONFLICT, B: b"b0 = 0\n" + UPSTREAM[B].replace(b"b1 = 1\n", b"b1 = 10\n")}
    repository = stopped(checkout, upstream)
    (repository / A).write_bytes(SOLVED)
    with pytest.raises(EfaError, match=f"0002-second.patch conflicts with 1.1 in {repository / B}"):
        rebase.go_on(checkout.layout)
    assert row(checkout, "0001", A)[3] == "conflict"
    (repository / B).write_bytes(b"top = 1\n" + upstream[B])
    rebase.go_on(checkout.layout)
    verify(checkout.layout, full=True)


def test_conflict_markers_are_not_taken_for_a_resolution(checkout):
    repository = stopped(checkout, CONFLICT)
    with pytest.raises(EfaError, match=rf"{repository / A}:\d+ still has a conflict marker"):
        rebase.go_on(checkout.layout)


@pytest.mark.parametrize(
    ("solve", "says"),
    [
        (
            lambda file: file.write_bytes(SOLVED.replace(b"a7 = 7\n", b"")),
            r"line 7 before the patch",
        ),
        (lambda file: file.unlink(), "is removed by the patch"),
        (
            lambda file: (file.write_bytes(SOLVED), (file.parent / "n.py").touch()),
            "n.py is created",
        ),
    ],
)
def test_a_resolution_may_only_insert(checkout, solve, says):
    repository = stopped(checkout, CONFLICT)
    solve(repository / A)
    with pytest.raises(EfaError, match=says):
        rebase.go_on(checkout.layout)
    (repository / A).write_bytes(SOLVED)
    (repository / "megatron/core/n.py").unlink(missing_ok=True)
    rebase.go_on(checkout.layout)
    verify(checkout.layout, full=True)


def test_a_file_that_upstream_dropped_is_a_conflict_that_asks_for_another_place(checkout):
    kept = {path: data for path, data in UPSTREAM.items() if path != B}
    checkout.release("1.1", kept)
    with pytest.raises(EfaError, match=f"0002-second.patch conflicts with 1.1 in .*{B}"):
        start(checkout)
    repository = checkout.layout.state / "rebase" / "repository"
    with pytest.raises(EfaError, match=f"{B} is created by the patch"):
        rebase.go_on(checkout.layout)
    (repository / B).unlink()
    loop = repository / LOOP
    loop.write_bytes(b"top = 1\n" + loop.read_bytes())
    rebase.go_on(checkout.layout)
    assert row(checkout, "0002", B) == ["file is gone", "", "0 -> none", "dropped", ""]
    assert {h.path for h in load(checkout.layout.patches)[1].hunks} == {A, LOOP}
    verify(checkout.layout, full=True)


def test_a_patch_that_upstream_has_now_is_dropped_and_the_gap_closed(checkout, capsys):
    upstream = UPSTREAM[A].replace(b"a3 = 3\n", b"a3 = 3\nfirst1 = 1\nfirst2 = 2\n")
    checkout.release("1.1", {**UPSTREAM, A: upstream, LOOP: UPSTREAM[LOOP] + b"tail = 1\n"})
    start(checkout)
    assert "moved 1 of 2" in capsys.readouterr().out
    assert [p.name for p in load(checkout.layout.patches)] == ["0001-second.patch"]
    assert row(checkout, "0001", A)[3] == "dropped"
    verify(checkout.layout, full=True)


def test_a_result_that_does_not_compile_is_mended_in_the_scratch_repository(checkout):
    repository = stopped(checkout, CONFLICT)
    (repository / A).write_bytes(SOLVED.replace(b"first2 = 2", b"first2 = ("))
    before = snapshot(checkout)
    with pytest.raises(EfaError, match=rf"{A}:\d+ does not compile .*git rebase --interactive"):
        rebase.go_on(checkout.layout)
    assert snapshot(checkout) == before
    assert row(checkout, "0001", A)[4].startswith("no: ")


def test_abort_leaves_everything_as_it_was(checkout):
    before = snapshot(checkout)
    stopped(checkout, CONFLICT)
    assert "is forgotten" in rebase.abort(checkout.layout)
    tree, patches = snapshot(checkout)
    assert (tree, {**patches, "upstream.toml": b""}) == (
        before[0],
        {**before[1], "upstream.toml": b""},
    )
    for command in (rebase.abort, rebase.go_on):
        with pytest.raises(EfaError, match="no rebase is under way"):
            command(checkout.layout)


def test_only_one_rebase_at_a_time(checkout):
    stopped(checkout, CONFLICT)
    with pytest.raises(EfaError, match=r"a rebase to 1.1 is under way: go on by"):
        start(checkout)


def test_a_series_that_changed_meanwhile_is_not_overwritten(checkout):
    repository = stopped(checkout, CONFLICT)
    (repository / A).write_bytes(SOLVED)
    checkout.write_series(SERIES[:1])
    with pytest.raises(EfaError, match="has changed since the rebase began"):
        rebase.go_on(checkout.layout)


def test_edits_in_the_tree_must_be_exported_first(checkout):
    checkout.release("1.1", UPSTREAM)
    checkout.edit(A, "first1 = 1\n", "first1 = 3\n")
    with pytest.raises(EfaError, match="keep the edit by `megatron-efa fork export`"):
        start(checkout)


def test_the_version_must_be_another_one_that_can_be_had(checkout):
    with pytest.raises(EfaError, match=r"the series is on 1.0 already"):
        start(checkout, "1.0")
    with pytest.raises(EfaError, match=r"megatron-core==7.0 cannot be fetched"):
        start(checkout, "7.0")


def test_a_release_with_another_content_than_known_is_refused(checkout):
    checkout.release("1.1", UPSTREAM)
    checkout.release("1.1", {**UPSTREAM, A: b"evil = 1\n"}, known=False)
    with pytest.raises(EfaError, match="has content hash"):
        start(checkout)


def test_an_unknown_release_is_named_and_recorded(checkout, capsys):
    checkout.release("1.1", UPSTREAM, known=False)
    assert "1.1" not in checkout.layout.pin().hashes
    start(checkout)
    assert checkout.layout.pin().hashes["1.1"] in capsys.readouterr().out
    assert checkout.layout.pin().hashes["1.0"]


def test_the_users_git_configuration_and_repository_do_not_matter(checkout, monkeypatch, tmp_path):
    config = tmp_path / "gitconfig"
    config.write_text(
        "[core]\n hooksPath = /nowhere\n autocrlf = true\n[commit]\n gpgSign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-repository"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    checkout.release("1.1", {**UPSTREAM, A: HEAD + UPSTREAM[A]})
    start(checkout)
    verify(checkout.layout, full=True)


def test_killed_before_the_scratch_repository_is_complete_nothing_has_begun(checkout):
    checkout.release("1.1", {**UPSTREAM, A: HEAD + UPSTREAM[A]})
    assert dies_at_rename(1, lambda: start(checkout))
    with pytest.raises(EfaError, match="no rebase is under way"):
        rebase.go_on(checkout.layout)
    start(checkout)
    verify(checkout.layout, full=True)


def test_killed_while_patches_are_rewritten_continue_finishes(checkout, monkeypatch):
    checkout.release("1.1", {**UPSTREAM, A: HEAD + UPSTREAM[A]})

    def die(directory, series):
        first, *_ = series
        (directory / first.name).write_bytes(first.render())
        os.kill(os.getpid(), 9)

    real = rebase.store
    monkeypatch.setattr(
        rebase, "store", lambda d, s: (real if d != checkout.layout.patches else die)(d, s)
    )
    assert dies_at_rename(10**6, lambda: start(checkout))
    monkeypatch.setattr(rebase, "store", real)
    with pytest.raises(EfaError, match="patches/ is half rewritten already"):
        rebase.abort(checkout.layout)
    rebase.go_on(checkout.layout)
    verify(checkout.layout, full=True)
    assert checkout.layout.pin().version == "1.1"


def test_a_commit_of_ones_own_in_the_scratch_repository_is_refused(checkout):
    repository = stopped(checkout, CONFLICT)
    (repository / A).write_bytes(SOLVED)
    monkey = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    os.system(f"cd {repository} && git add -A && git {' '.join(monkey)} commit -qm 'mine'")
    with pytest.raises(EfaError, match=r"\(mine\) in .* is none of the series"):
        rebase.go_on(checkout.layout)


def test_a_hook_of_two_patches_at_one_place_keeps_its_order(checkout):
    series = [patch(1, "one", hunk(A, 5, "x = 1")), patch(2, "two", hunk(A, 6, "y = 2"))]
    checkout.write_series(series)
    checkout.sync()
    export(checkout.layout)
    checkout.release("1.1", {**UPSTREAM, A: HEAD + UPSTREAM[A]})
    start(checkout)
    assert b"a5 = 5\nx = 1\ny = 2\na6 = 6\n" in checkout.tree()[A]
    assert [p.title for p in load(checkout.layout.patches)] == ["one", "two"]
