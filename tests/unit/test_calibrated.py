"""A described cluster is planned for by its own links, a calibrated one by what was measured."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.efa import cli
from megatron.efa.cluster import describe
from megatron.efa.cluster.model import Cluster, Compute, Link, Node
from megatron.efa.errors import EfaError
from megatron.efa.planner import machines, rates, search
from megatron.efa.planner.layout import Job
from megatron.efa.planner.shape import find


def link(peak, latency):
    sizes = (1e4, 1e6, 1e8)
    points = tuple((size, latency + size / peak) for size in sizes)
    return Link(peak, latency, tuple((name, points) for name in rates.COLLECTIVES))


def cluster_of(far=40e9, kind="H200", **more):
    gemm = tuple((2.0 * n**3, 7e14 * n / (n + 2000)) for n in (256, 1024, 4096, 16384))
    compute = Compute(kind, 140e9, 4e12, (("bf16", gemm),), 4e-4, 2e-3, 1e-5, 0.05)
    nodes = tuple(Node(f"n{i}", 8) for i in range(8))
    return Cluster(nodes, near=link(400e9, 1e-5), far=link(far, 1e-4), compute=compute, **more)


QWEN = Job(64, 4096, 512, pp=2, ep=16, dispatcher="hierarchical")


def seconds(cluster, job=QWEN):
    machine = machines.of_cluster(cluster, "it")
    return search.evaluate(find("qwen3-30b-a3b"), [job], machine)[0]


def write(tmp_path, cluster):
    path = tmp_path / "cluster.yaml"
    describe.write(cluster, path)
    return str(path)


POINTS = st.lists(
    st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=1, max_size=6,
    unique_by=lambda point: point[0],
).map(sorted)  # fmt: skip


@given(POINTS, st.floats(1, 1e12))
@settings(deadline=None)
def test_a_curve_goes_through_its_points_and_never_outside_its_neighbours(points, size):
    curve = tuple(points)
    for at, value in points:
        assert float(rates.time_of(curve, at)) == pytest.approx(value, rel=1e-6)
    found = float(rates.time_of(curve, size))
    if size > points[-1][0]:
        assert found == pytest.approx(points[-1][1] * size / points[-1][0], rel=1e-6)
    else:
        around = [v for i, (a, v) in enumerate(points)
                  if a >= size and (i == 0 or points[i - 1][0] <= size)]  # fmt: skip
        around += [v for i, (a, v) in enumerate(points)
                   if a <= size and (i + 1 == len(points) or points[i + 1][0] >= size)]  # fmt: skip
        assert min(around) * (1 - 1e-9) <= found <= max(around) * (1 + 1e-9)


def test_a_calibrated_cluster_is_written_and_read_back(tmp_path):
    cluster = cluster_of(source="measured")
    assert describe.read(write(tmp_path, cluster)) == cluster


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("far: {bytes_per_second: 1, seconds: 1, curves: {alltoall: [[2, 1], [1, 1]]}}", "by size"),
        ("far: {bytes_per_second: 1, seconds: 1, curves: {alltoall: 3}}", "list of points"),
        ("compute: {kind: cpu}", "compute has no memory_bytes"),
    ],
)
def test_a_broken_calibration_is_told_by_file_and_key(tmp_path, line, why):
    path = tmp_path / "x.yaml"
    path.write_text(f"{line}\nnodes:\n  - {{name: a, gpus: 8}}\n")
    with pytest.raises(EfaError, match=why) as told:
        describe.read(path)
    assert str(path) in str(told.value)


def test_the_breakdown_of_a_calibrated_cluster_sums_to_the_step():
    plan = seconds(cluster_of())
    assert sum(plan.parts.values()) == pytest.approx(plan.seconds)
    assert min(plan.parts.values()) >= 0
    assert plan.parts["ep_far"] > 0


def test_a_slower_network_makes_only_what_crosses_it_slower():
    fast, slow = seconds(cluster_of()), seconds(cluster_of(far=10e9))
    for name in ("ep_far", "pp", "dp"):
        assert slow.parts[name] > fast.parts[name], name
    for name in ("compute", "experts", "ep_near", "tp"):
        assert slow.parts[name] == fast.parts[name], name


def test_computing_and_launching_add_up_on_cpus_and_overlap_on_gpus():
    """Launches that a GPU hides behind its own work cost a CPU their whole time."""
    gpu, cpu = seconds(cluster_of()), seconds(cluster_of(kind="cpu"))
    assert cpu.parts["host"] > gpu.parts["host"] > 0
    assert cpu.parts["compute"] == gpu.parts["compute"]


def test_a_precision_that_was_not_measured_is_refused():
    job = Job(64, 4096, 512, pp=2, ep=16, precision="fp8")
    with pytest.raises(EfaError, match="not calibrated in fp8, only in bf16"):
        seconds(cluster_of(), job)


def plan(capsys, *words):
    fixed = ("--fix", "mbs=1", "--fix", "parallel.pp=1", "--gbs", "256", "--top", "3")
    code = cli.main(["plan", "--model", "qwen3-30b-a3b", *fixed, *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_description_of_known_machines_is_planned_as_their_family(tmp_path, capsys):
    nodes = tuple(Node(f"n{i}", 8, kind="p5en.48xlarge") for i in range(2))
    path = write(tmp_path, Cluster(nodes, near=None, far=None))
    _, described, _ = plan(capsys, "--cluster", path, "--json")
    _, family, _ = plan(capsys, "--cluster", "p5en", "--nodes", "2", "--json")
    for a, b in zip(json.loads(described), json.loads(family), strict=True):
        assert a["layout"] == b["layout"]
        assert math.isclose(a["step_s"], b["step_s"], rel_tol=1e-9)


def test_slower_links_in_a_description_make_a_slower_plan(tmp_path, capsys):
    nodes = tuple(Node(f"n{i}", 8, kind="p5en.48xlarge") for i in range(2))
    path = write(tmp_path, Cluster(nodes, far=Link(5e9, 2e-5)))
    ep16 = ("--fix", "parallel.ep=16", "--json")
    _, slow, _ = plan(capsys, "--cluster", path, *ep16)
    _, family, _ = plan(capsys, "--cluster", "p5en", "--nodes", "2", *ep16)
    assert json.loads(slow)[0]["step_s"] > json.loads(family)[0]["step_s"]


def test_a_calibrated_description_is_planned_with_its_nodes(tmp_path, capsys):
    path = write(tmp_path, cluster_of())
    code, out, _ = plan(capsys, "--cluster", path)
    assert code == 0
    assert f"on 8 {path} nodes" in out
    code, _, err = plan(capsys, "--cluster", path, "--nodes", "9")
    assert code == 2
    assert "lists 8 nodes" in err


def test_a_description_that_says_neither_kind_nor_rates_is_refused(tmp_path, capsys):
    path = write(tmp_path, Cluster((Node("a", 8), Node("b", 8))))
    code, _, err = plan(capsys, "--cluster", path)
    assert code == 2
    assert "megatron-efa calibrate" in err
    code, _, err = plan(capsys, "--cluster", "p5en")
    assert code == 2
    assert "--nodes is missing" in err


def test_a_tier_that_was_not_measured_is_not_free():
    cluster = cluster_of()
    nothing = replace(cluster, far=Link(1e9, 1e-5))
    with pytest.raises(EfaError, match="not calibrated between its nodes"):
        seconds(nothing)


def test_calibrate_outside_a_job_says_how_to_start_it(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["calibrate", "-o", str(tmp_path / "c.yaml")]) == 2
    assert "torchrun" in capsys.readouterr().err
    assert cli.main(["calibrate", "-o", str(tmp_path / "c.txt")]) == 2
    assert not list(tmp_path.iterdir())
