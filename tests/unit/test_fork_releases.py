"""The real series on the real releases.

These need the wheels of three releases, from the cache that `fork sync` fills or from the package
index. Without either they fail and say so: a proof that is skipped in silence is none. They are
deselected by `-m "not network"`.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fork_checkout import HEADER

from megatron.efa.errors import EfaError
from megatron.efa.fork import lines, rebase
from megatron.efa.fork.export import export
from megatron.efa.fork.layout import Layout
from megatron.efa.fork.series import Patch, load
from megatron.efa.fork.sync import sync
from megatron.efa.fork.verify import verify
from megatron.efa.fork.wheel import obtain

pytestmark = pytest.mark.network
REAL = Layout.of_this_checkout()
PINNED = REAL.pin().version
OTHER, OLDER = "0.19.0", "0.18.2"

# Where other hooks of the project will go, each as a line after which to insert, an insertion that
# keeps the file valid, and what is known of it on 0.18.2 (facts of the releases, found by reading).
ANCHORS = {
    "megatron/core/parallel_state.py": (  # the head of the teardown is new in 0.19
        r'def destroy_model_parallel\(\):\n    """.*"""\n',
        "    _efa_probe = 1\n",
    ),
    "megatron/core/tensor_parallel/layers.py": (  # the next function's signature changed
        r"except:\n    dist_all_gather_func = .*\n    dist_reduce_scatter_func = .*\n\n\n",
        "_efa_probe = 1\n",
    ),
    "megatron/training/training.py": (  # the function is new in 0.19
        r"        bucket_size = num_parameters // ddp_config.num_buckets\n",
        "        _efa_probe = 1\n",
    ),
    "megatron/core/distributed/finalize_model_grads.py": (r"\Z", "_efa_probe = 1\n"),
    "megatron/core/distributed/param_and_grad_buffer.py": (  # merges, far from where it was
        r"    def start_grad_sync\(.*\n",
        "        # probe\n",
    ),
}
CONFLICTING = list(ANCHORS)[:3]


@pytest.fixture(scope="session")
def pinned():
    return obtain(REAL.pin(), PINNED)


@pytest.fixture
def checkout(tmp_path, monkeypatch, pinned):
    """A copy of this checkout's series, with the real releases."""
    layout = Layout(tmp_path / "checkout")
    shutil.copytree(REAL.patches, layout.patches)
    sync(layout)
    return layout


def tree_as_made(layout, monkeypatch):
    """`verify --full` but for the import path, which is that of the running interpreter."""
    monkeypatch.setattr("megatron.efa.fork.verify.check_imports", lambda layout: None)
    monkeypatch.setattr("megatron.efa.fork.verify.check_rules", lambda root, series: None)
    verify(layout, full=True)


def patches(layout) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in layout.patches.iterdir()}


def with_probes(base, series) -> list[Patch]:
    """The series with a patch more that inserts at each anchor."""
    number = len(series) + 1
    files = lines.apply(series, base.files.get)
    for path, (pattern, text) in ANCHORS.items():
        file = files.get(path) or [(line, 0) for line in lines.split(base.files[path])]
        (match,) = re.finditer(pattern, lines.join(file).decode())
        at = lines.join(file)[: len(match.string[: match.end()].encode())].count(b"\n")
        files[path] = [*file[:at], (text.encode(), number), *file[at:]]
    hunks = [h for path in sorted(files) for h in lines.hunks(path, files[path], number)]
    return [*series, Patch(number, "probes", HEADER, tuple(hunks))]


@pytest.mark.parametrize("version", [PINNED, OTHER, OLDER])
def test_each_known_release_has_its_content_hash(version):
    assert obtain(REAL.pin(), version).sha256 == REAL.pin().hashes[version]


def test_the_content_hash_can_be_had_by_hand(tmp_path, pinned):
    """By the command that `patches/upstream.toml` prints above it."""
    for path, data in pinned.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    text = REAL.pin_file.read_text()
    command = "".join(x[1:] for x in text.splitlines() if x.startswith("#   "))
    assert command.lstrip().startswith("find megatron/core")
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split()[0] == REAL.pin().sha256


def test_exporting_the_real_series_changes_no_byte(checkout):
    before = patches(checkout)
    assert export(checkout) == []
    assert patches(checkout) == before == patches(REAL)


def test_git_applies_the_real_series_to_the_same_bytes(tmp_path, pinned):
    series = load(REAL.patches)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for path in {path for patch in series for path in patch.paths}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(pinned.files[path])
    for patch in series:
        command = ["git", "apply", "--unidiff-zero", str(REAL.patches / patch.name)]
        subprocess.run(command, cwd=tmp_path, check=True)
    for path, file in lines.apply(series, pinned.files.get).items():
        assert (tmp_path / path).read_bytes() == lines.join(file)


def test_between_neighbouring_releases_the_series_moves_cleanly(checkout, pinned, monkeypatch):
    for patch in with_probes(pinned, load(checkout.patches)):
        (checkout.patches / patch.name).write_bytes(patch.render())
    sync(checkout)
    export(checkout)
    before = patches(checkout)
    rebase.start(checkout, OTHER)
    tree_as_made(checkout, monkeypatch)
    report = (checkout.state / "rebase-report.md").read_text()
    results = {row.split("|")[6].strip() for row in report.splitlines() if "| megatron/" in row}
    assert results == {"clean"}
    rebase.start(checkout, PINNED)
    tree_as_made(checkout, monkeypatch)
    assert patches(checkout) == before


def test_on_the_older_release_real_conflicts_stop_and_drift_is_shown(
    checkout, pinned, monkeypatch, capsys
):
    # Patches that hook into what 0.19 changed conflict there one after the other. The probes, which
    # stand in the same files, show that in one.
    first, later = (load(checkout.patches)[part] for part in (slice(4), slice(4, None)))
    for patch in later:
        (checkout.patches / patch.name).unlink()
    sync(checkout)
    series = with_probes(pinned, first)
    probes = series[-1]
    (checkout.patches / probes.name).write_bytes(probes.render())
    sync(checkout)
    before = patches(checkout)
    with pytest.raises(EfaError, match=f"{probes.name} conflicts with {OLDER}") as error:
        rebase.start(checkout, OLDER)
    assert all(path in str(error.value) for path in CONFLICTING)
    assert patches(checkout) == before
    repository = checkout.state / "rebase" / "repository"
    for path in CONFLICTING:
        resolve(repository / path, ANCHORS[path][1])
    rebase.go_on(checkout)
    tree_as_made(checkout, monkeypatch)
    report = (checkout.state / "rebase-report.md").read_text()
    print(report)
    rows = {
        row.split("|")[2].strip(): [cell.strip() for cell in row.split("|")[3:-1]]
        for row in report.splitlines()
        if row.startswith(f"| {probes.number:04d} ")
    }
    for path, (upstream, nearest, places, result, compiles) in rows.items():
        assert upstream.startswith("+")
        assert result == ("conflict" if path in CONFLICTING else "moved")
        assert compiles == "yes"
        old, new = places.split(" -> ")
        assert path in CONFLICTING or (old != new and int(nearest) >= 1)
    assert rows.keys() == ANCHORS.keys()


def resolve(file: Path, inserted: str) -> None:
    """Take the release's side of each conflict, and put the insertion behind it."""
    text = file.read_text()
    block = re.compile(
        r"<<<<<<< [^\n]*\n(.*?)\|{7} [^\n]*\n.*?\n?=======\n.*?>>>>>>> [^\n]*\n", re.S
    )
    assert block.search(text)
    # Where the release has no such code the insertion has no place either; a comment keeps it.
    file.write_text(block.sub(lambda match: match[1], text) + f"# {inserted.strip()}\n")
