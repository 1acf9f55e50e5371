"""What set-up promises: one place for dependencies, and an image's PyTorch is never replaced."""

import subprocess
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
