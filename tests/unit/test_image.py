"""The image is built of what the matrix of versions says, and its scripts refuse a wrong plugin."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.efa.errors import EfaError
from megatron.efa.fabric import versions

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ASSERT = ROOT / "tools/image/assert.sh"
ENTRYPOINT = ROOT / "tools/image/entrypoint.sh"
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
PLUGIN = "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"


def tool(name):
    """A linter beside this Python or on the path; the test is skipped where there is none."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return found or pytest.skip(f"{name} is not installed")


def test_build_arguments_are_the_matrix_image():
    image = versions.matrix()["image"]
    brought = versions.brought_by(image["installer"])
    assert ARGUMENTS["BASE"].partition("/")[2] == image["base"]
    assert ARGUMENTS["EFA_INSTALLER"] == image["installer"]
    assert ARGUMENTS["EFA_LIBFABRIC"] == brought["libfabric"]
    assert ARGUMENTS["EFA_PLUGIN"] == brought["plugin"]


def test_no_trap_and_no_floor_is_met_by_what_the_image_is_built_of():
    image = versions.matrix()["image"]
    built = {"installer": image["installer"], **versions.brought_by(image["installer"])}
    assert not [trap for trap in versions.traps() if trap.matches(built, {})]
    assert versions.holds(f">={versions.matrix()['floors']['installer']}", image["installer"])
    ran = versions.matrix()["ran"]
    assert any(row.get("base") == image["base"] for row in ran), "the base was never run on EFA"
    assert any(row.get("installer") == image["installer"] for row in ran)


def test_the_installer_runs_as_it_must_in_a_container():
    (line,) = re.findall(r"efa_installer\.sh (.+) \\", DOCKERFILE)
    flags = "-y -g -d --skip-kmod --skip-limit-conf --no-verify --disable-build-ngc"
    assert line.split() == flags.split()


def test_every_source_of_the_matrix_is_named_and_every_condition_can_be_read():
    matrix = versions.matrix()
    assert {row["source"] for row in matrix["ran"]} <= set(matrix["sources"])
    for trap in versions.traps():
        assert trap.level in ("warn", "fail")
        for condition in trap.when.values():
            versions.holds(condition, "1.2.3")


@pytest.mark.parametrize(
    ("condition", "version", "expected"),
    [
        ("<1.29.1", "1.29.0", True),
        ("<1.29.1", "1.29.1", False),
        (">=2.28,<2.28.9", "2.28.9", False),
        (">=2.28", "2.28.0", True),
        ("==1.35.0", "1.35", True),
        (">=2.4", "2.4.0amzn1.0", True),
        (">=1.10", "1.9", False),
    ],
)
def test_versions_compare_by_their_numbers(condition, version, expected):
    assert versions.holds(condition, version) is expected


def test_a_condition_that_is_none_is_refused_with_its_file():
    with pytest.raises(EfaError, match=r"versions.yaml.*'~=1'"):
        versions.holds("~=1", "1")


def test_hadolint_finds_nothing():
    done = subprocess.run([tool("hadolint"), "-"], input=DOCKERFILE, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_shellcheck_finds_nothing():
    scripts = [str(ASSERT), str(ENTRYPOINT)]
    done = subprocess.run([tool("shellcheck"), *scripts], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def image(tmp_path):
    """A root folder with a plugin, and programs that answer as in the image."""
    root = tmp_path / "root"
    (root / PLUGIN[1:]).parent.mkdir(parents=True)
    (root / PLUGIN[1:]).write_bytes(b"NET/OFI aws-ofi-nccl 1.21.1")
    programs = tmp_path / "bin"
    programs.mkdir()
    answers = {
        "fi_info": 'case $1 in --version) echo "libfabric: 2.6.0amzn1.0";; *) echo "efa:";; esac',
        "python3": "exit 0",
    }
    for name, body in answers.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "ROOT": str(root),
        "NCCL_NET_PLUGIN": PLUGIN,
        "LD_LIBRARY_PATH": "/opt/amazon/ofi-nccl/lib",
    }

    def run(script, *arguments, **more):
        command = [str(script), *arguments]
        return subprocess.run(
            command, env={**environment, **more}, capture_output=True, text=True, timeout=30
        )

    return root, programs, run


def build(run, plugin="1.21.1", libfabric="2.6.0amzn1.0"):
    return run(ASSERT, plugin, libfabric)


def test_a_build_with_the_right_plugin_writes_down_what_the_doctor_compares(image):
    root, _, run = image
    assert build(run).returncode == 0
    written = (root / "etc/megatron-efa/environment").read_text()
    assert f"NCCL_NET_PLUGIN={PLUGIN}" in written
    assert "LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib" in written


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("gone", "is not there"),
        ("other", "is not the plugin for EFA"),
        ("release", "is not release 1.21.1"),
        ("libfabric", "libfabric is not 2.6.0amzn1.0"),
        ("provider", "no efa provider"),
        ("load", "does not load"),
    ],
)
def test_a_build_with_a_wrong_plugin_ends(image, spoil, words):
    root, programs, run = image
    plugin = root / PLUGIN[1:]
    if spoil == "gone":
        plugin.unlink()
    elif spoil == "other":
        plugin.write_bytes(b"spcx 1.21.1")
    elif spoil == "release":
        plugin.write_bytes(b"NET/OFI aws-ofi-nccl 1.19.1")
    elif spoil == "libfabric":
        (programs / "fi_info").write_text("#!/bin/bash\necho 'libfabric: 2.6.0'\n")
    elif spoil == "provider":
        fi_info = (programs / "fi_info").read_text().replace("efa:", "tcp:")
        (programs / "fi_info").write_text(fi_info)
    else:
        (programs / "python3").write_text("#!/bin/bash\nexit 1\n")
    done = build(run)
    assert done.returncode == 1
    assert words in done.stderr


def test_a_container_starts_its_command_with_the_plugin_of_the_build(image):
    _, _, run = image
    build(run)
    done = run(ENTRYPOINT, "echo", "training")
    assert (done.returncode, done.stdout) == (0, "training\n")


def test_a_job_may_name_the_plugin_as_nccl_looks_it_up(image):
    _, _, run = image
    build(run)
    for value in ("ofi", "libnccl-net-ofi.so"):
        assert run(ENTRYPOINT, "true", NCCL_NET_PLUGIN=value).returncode == 0
    lost = run(ENTRYPOINT, "true", NCCL_NET_PLUGIN="ofi", LD_LIBRARY_PATH="/usr/lib")
    assert lost.returncode == 78
    assert "leads to no file" in lost.stderr


@pytest.mark.parametrize("value", ["spcx", "", "/opt/other.so"])
def test_a_container_in_which_nccl_would_open_another_plugin_does_not_start(image, value):
    root, _, run = image
    build(run)
    (root / "opt/other.so").write_bytes(b"other")
    done = run(ENTRYPOINT, "echo", "training", NCCL_NET_PLUGIN=value)
    assert done.returncode == 78
    assert done.stdout == ""
    assert str(root / PLUGIN[1:]) in done.stderr
    assert (
        run(ENTRYPOINT, "true", NCCL_NET_PLUGIN=value, MEGATRON_EFA_PLUGIN_CHECK="off").returncode
        == 0
    )


@pytest.mark.parametrize(("driver", "found"), [("580.95.05", False), ("550.54.15", True)])
def test_compatibility_libraries_are_found_only_beside_an_older_driver(image, driver, found):
    root, _, run = image
    build(run)
    (root / "opt/cuda-compat/lib.real").mkdir(parents=True)
    (root / "opt/cuda-compat/lib.real/libcuda.so.575.57.08").touch()
    version = root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Build\n"
    )
    done = run(ENTRYPOINT, "bash", "-c", "echo $LD_LIBRARY_PATH")
    assert ("cuda-compat/lib.real" in done.stdout) is found
