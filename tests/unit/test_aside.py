"""What is made aside goes away in any case, also after a kill, and two runs never mix."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron.efa import aside

ROOT = Path(__file__).resolve().parents[2]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_is_beside_the_target_and_gone_afterwards(tmp_path):
    target = tmp_path / "new" / "out"

    def interrupted():
        with aside.beside(target) as scratch:
            (scratch / "half").write_text("x")
            assert scratch.parent.parent == target.parent
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(target.parent) == []


def test_what_a_killed_run_left_is_removed_by_the_next_and_nothing_else(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from megatron.efa import aside\n"
        "with aside.beside(Path(sys.argv[1])) as scratch:\n"
        "    (scratch / 'half').write_text('x'); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -9
    (left,) = names(tmp_path)
    assert left.startswith(".out.partial-")
    (tmp_path / ".out.partial-file").write_text("a file of the user's")
    (tmp_path / ".other.partial-x").mkdir()
    with aside.beside(tmp_path / "out") as first, aside.beside(tmp_path / "out") as second:
        assert first.is_dir()  # in use: the second start leaves it alone
        assert left not in names(tmp_path)
        assert len({first, second}) == 2
    assert names(tmp_path) == [".other.partial-x", ".out.partial-file"]


def test_what_is_made_inside_another_folder_that_is_being_made_does_not_wait_for_it(tmp_path):
    with aside.beside(tmp_path / "outer") as outer, aside.beside(outer / "inner") as inner:
        (inner / "file").write_text("x")
        with aside.alone(outer) as certain:
            (inner / "file").replace(outer / "file")
    assert certain
    assert names(tmp_path) == []


def test_what_was_made_can_be_moved_to_the_target(tmp_path):
    with aside.beside(tmp_path / "out") as made:
        (made / "file").write_text("x")
        made.replace(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["file"]


def test_one_at_a_time_moves_its_files_in(tmp_path):
    order = []

    def other():
        with aside.alone(tmp_path):
            order.append("second")

    with aside.alone(tmp_path) as certain:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert (certain, order) == (True, ["first", "second"])


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    (tmp_path / ".out.partial-x").mkdir()
    monkeypatch.setattr(aside.fcntl, "flock", lambda *_: os.stat("/no/such/file"))
    with aside.beside(tmp_path / "out"):
        pass
    assert names(tmp_path) == [".out.partial-x"]


def test_a_lock_that_is_never_given_back_is_an_error_and_no_hang(tmp_path):
    def impatient():
        with aside.alone(tmp_path, patience_s=0.2):
            raise AssertionError("it is held by another")

    with (
        aside.alone(tmp_path),
        pytest.raises(TimeoutError, match=r"held its lock.*" + tmp_path.name),
    ):
        impatient()
