"""A start removes what dead emulations left, and nothing of living ones."""

import contextlib
import os
import subprocess
from ipaddress import ip_network

import pytest

from megatron.efa.emulate import claims, processes
from megatron.efa.errors import EfaError


@contextlib.contextmanager
def sleeper(token):
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, processes.TAG: token})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def abandon(claim):
    """What the kernel does when the owner dies: the lock is free, the files stay."""
    os.close(claim.lock)


def test_emulations_at_the_same_time_have_subnets_of_their_own(tmp_path):
    first, second = (claims.claim(name, [], tmp_path) for name in ("a", "b"))
    assert not first.subnet.overlaps(second.subnet)
    second.release()
    first.release()


def test_a_subnet_in_use_on_the_host_is_left_alone(tmp_path):
    busy = ["198.18.0.77/30", "198.18.1.0/24"]
    claim = claims.claim("a", busy, tmp_path)
    assert not any(claim.subnet.overlaps(ip_network(used, strict=False)) for used in busy)
    claim.release()


def test_a_name_in_use_is_refused_and_free_again_after_release(tmp_path):
    first = claims.claim("a", [], tmp_path)
    with pytest.raises(EfaError, match="named a is running"):
        claims.claim("a", [], tmp_path)
    first.release()
    claims.claim("a", [], tmp_path).release()


def test_the_next_start_kills_what_the_dead_left_and_spares_the_living(tmp_path):
    dead, living = (claims.claim(name, [], tmp_path) for name in ("dead", "living"))
    with sleeper(dead.token) as orphan, sleeper(living.token) as busy:
        abandon(dead)
        mine = claims.claim("mine", [], tmp_path)
        assert orphan.wait(timeout=5) == -9
        assert busy.poll() is None
    assert not dead.directory.exists()
    assert living.directory.exists()
    mine.release()
    living.release()


@pytest.mark.parametrize("content", [None, "", "{}", "{not json"])
def test_a_claim_whose_owner_died_while_making_it_is_removed(tmp_path, content):
    half = tmp_path / "half"
    half.mkdir()
    if content is not None:
        (half / "lock").touch()
        (half / "claim.json").write_text(content)
    claims.claim("a", [], tmp_path).release()
    assert not half.exists()


@pytest.mark.parametrize("name", ["", "A", "a/b", "-a", "a b", "..", "x" * 41])
def test_a_name_that_would_not_fit_a_path_is_refused(name):
    with pytest.raises(EfaError, match="lower-case"):
        claims.checked_name(name)


def test_a_process_is_known_by_its_start_time():
    assert processes.start_time(os.getpid()) == processes.start_time(os.getpid())
    with sleeper("x") as child:
        assert processes.start_time(child.pid) >= processes.start_time(os.getpid())
        assert child.pid in processes.children(os.getpid())
    with pytest.raises(ProcessLookupError):
        processes.start_time(child.pid)
