"""What set-up promises: one place for dependencies, and an image's PyTorch is never replaced."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needs_of(requirement: Requirement) -> list[Requirement]:
    """What an installed distribution asks for in turn, with the extras that were asked of it."""
    extras = [{"extra": extra} for extra in requirement.extras] or [{"extra": ""}]
    needs = map(Requirement, metadata.requires(requirement.name) or [])
    return [n for n in needs if n.marker is None or any(map(n.marker.evaluate, extras))]


def closure(requirements: list[str]) -> set[str]:
    """Canonical names of everything that installing `requirements` brings."""
    seen, todo = set(), list(map(Requirement, requirements))
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            todo += needs_of(requirement)
    return {name for name, _ in seen}


def test_installing_without_the_torch_extra_cannot_bring_a_torch():
    brought = closure(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"])
    assert "hydra-core" in brought, "the walk itself must work"
    assert not brought & {"torch", "triton", "torchvision"}


def test_the_walk_finds_torch_where_it_is_asked_for():
    assert "triton" in closure(["torch"]) or "sympy" in closure(["torch"])


@pytest.mark.parametrize("group", ["dependencies", *PROJECT["optional-dependencies"]])
def test_every_dependency_is_pinned_by_a_range(group):
    named = (
        PROJECT["dependencies"]
        if group == "dependencies"
        else PROJECT["optional-dependencies"][group]
    )
    for requirement in map(Requirement, named):
        operators = {clause.operator for clause in requirement.specifier}
        assert ">=" in operators, f"{requirement} has no lower bound"
        assert "<" in operators, f"{requirement} has no upper bound"


def test_dependencies_stand_in_pyproject_alone():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert not [
        f for f in tracked if Path(f).name.startswith(("requirements", "setup.cfg", "Pipfile"))
    ]


def test_megatron_is_a_namespace_with_no_init_of_its_own():
    assert not (ROOT / "megatron" / "__init__.py").exists(), "it would hide megatron.core"


def test_shell_scripts_parse():
    scripts = [*ROOT.glob("tools/*.sh"), ROOT / ".ci" / "run"]
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with an environment in it, and how to bootstrap it where there is no Python."""
    place = tmp_path / "a path/checkout"
    (place / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools/bootstrap.sh", place / "tools")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "head", "realpath", "rm", "sed"):
        (tools / name).symlink_to(shutil.which(name))

    def bootstrap(made_in, line):
        (place / ".venv/bin").mkdir(parents=True, exist_ok=True)
        (place / ".venv/bin/activate").write_text(line.format(made_in) + "\n")
        command = ["bash", str(place / "tools/bootstrap.sh")]
        done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True)
        assert "no Python 3.12 or newer and no uv on the PATH" in done.stderr
        return (place / ".venv").exists()

    return place, bootstrap


ACTIVATE = ["VIRTUAL_ENV='{}'", '    export VIRTUAL_ENV="{}"', "export VIRTUAL_ENV={}"]


@pytest.mark.parametrize("line", ACTIVATE, ids=["uv", "venv", "venv of 3.13"])
def test_an_environment_made_elsewhere_is_made_anew(checkout, line, tmp_path):
    place, bootstrap = checkout
    assert bootstrap(place / ".venv", line)
    (tmp_path / "link").symlink_to(place)
    assert bootstrap(tmp_path / "link/.venv", line)
    assert not bootstrap(f"/elsewhere{place}/.venv", line)
    assert not bootstrap("/gone/.venv", line)


def test_make_sets_up_once_and_again_in_another_place(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/bootstrap.sh").write_text('mkdir -p "$1"; echo bootstrapped\n')

    def make(place):
        command = ["make", "-C", str(place), ".venv/.ready"]
        return "\nbootstrapped" in subprocess.check_output(command, text=True)

    assert [make(tmp_path), make(tmp_path)] == [True, False]
    moved = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name} moved")
    assert [make(moved), make(moved)] == [True, False]


def test_set_up_compiles_the_trees_but_not_the_edits_that_sync_set_aside(tmp_path):
    recipe = re.search(r"\$\(PY\) (.*-m compileall .*?) #", (ROOT / "Makefile").read_text())[1]
    for name, text in (("core/a.py", "a = 1"), (".fork/discarded/megatron/core/a.py", "a = (")):
        file = tmp_path / "megatron" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(f"{sys.executable} {recipe}", shell=True, cwd=tmp_path, env=env, check=True)
    assert [*tmp_path.glob("megatron/core/__pycache__/a.*.pyc")]
