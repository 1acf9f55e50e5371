"""A description of a cluster says what it means, or what is wrong with it in a sentence."""

import json
import os
import socket
import xml.etree.ElementTree as ET
from argparse import Namespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron.efa import cli
from megatron.efa.cluster import catalogue, current, describe, show
from megatron.efa.cluster.model import Cluster, Link, Node
from megatron.efa.errors import EfaError

NAMES = st.text("abcdefghij-0123456789:#'é ", min_size=1, max_size=9).map(lambda text: "n" + text)


@st.composite
def clusters(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    nodes = [
        Node(
            name,
            draw(st.integers(1, 8)),
            tuple(draw(st.lists(NAMES, max_size=4))),
            draw(st.sampled_from(["", "p5.48xlarge", "p5en.48xlarge"])),
            draw(st.sampled_from(["", "domain 1", "null"])),
            draw(st.sampled_from(["", "10.0.0.1"])),
            draw(st.sampled_from(["", "i-0"])),
        )
        for name in names
    ]
    kept = draw(st.integers(1, len(nodes)))
    near, far = describe.links_of(nodes[:kept])
    links = st.builds(Link, st.floats(1e-3, 1e12), st.floats(0, 1))
    near, far = draw(st.just(near) | links), draw(st.just(far) | links)
    notes = tuple(draw(st.lists(NAMES, max_size=2)))
    return Cluster(tuple(nodes[:kept]), tuple(nodes[kept:]), draw(NAMES), near, far, notes)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    for name in (current.VARIABLE, "MEGATRON_EFA_HOST", "SLURMD_NODENAME", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(current, "_described", None)
    yield
    current.forget()


@settings(deadline=None, max_examples=60)
@given(clusters())
def test_what_is_written_is_read_back(tmp_path_factory, cluster):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    describe.write(cluster, path)
    back = describe.read(path)
    assert back == cluster
    assert back.notes == cluster.notes
    assert describe.text_of(back) == path.read_text()


def test_kinds_say_gpus_and_links(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n- {name: a, kind: p5en.48xlarge}\n- {name: b, kind: p4d.24xlarge}\n")
    cluster = describe.read(path)
    assert cluster.world_size == 16
    slower = catalogue.machine("p4d.24xlarge")
    assert (cluster.near, cluster.far) == (slower.near, slower.far)
    path.write_text("far: {bytes_per_second: 1e9, seconds: 2e-5}\n" + path.read_text())
    assert describe.read(path).far == Link(1e9, 2e-5)


NODES = "nodes: [{name: a, gpus: 2}]\n"
WRONG = {
    "": "must have keys",
    "[]": "must have keys",
    "nodes: []": "nodes is empty",
    "nodes: [": "line 1",
    "nodes: [{name: a, gpus: 2}, {name: a, gpus: 2}]": "two nodes are called a",
    "nodes: [{gpus: 2}]": "nodes\\[0\\] has no name",
    "nodes: [{name: a}]": "neither gpus nor a kind",
    "nodes: [{name: a, gpus: 0}]": "nodes\\[0\\].gpus is 0",
    "nodes: [{name: a, gpus: two}]": "nodes\\[0\\].gpus must be a whole number",
    "nodes: [{name: a, gpus: true}]": "must be a whole number",
    "nodes: [{name: a, gpu: 2}]": "no key nodes\\[0\\].gpu; did you mean gpus",
    "nodes: [{name: a, kind: p5.48xlarg}]": "'p5.48xlarg'; did you mean p5.48xlarge",
    "nodes: [{name: a, kind: p5.48xlarge, gpus: 9}]": "a p5.48xlarge has 8",
    "nodes: [{name: a, gpus: 2, path: [1]}]": "nodes\\[0\\].path is a list of names",
    NODES + "far: {bytes_per_second: 1}": "far has no seconds",
    NODES + "far: {bytes_per_second: 0, seconds: 1}": "must be above 0",
    NODES + "near: 3": "near must be a mapping",
    NODES + "node: 3": "no key node; did you mean nodes",
    NODES + NODES: "nodes is given twice",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_said_with_file_and_key(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(EfaError, match=WRONG[text]) as refused:
        describe.read(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value) or "catalogue" in str(refused.value)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(EfaError, match="No such file"):
        describe.read(tmp_path / "none.yaml")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.mkdir()
    with pytest.raises(EfaError, match="cannot write"):
        describe.write(Cluster((Node("a", 1),)), path)
    assert [p.name for p in tmp_path.iterdir()] == ["c.yaml"]


def job(tmp_path, text, **more):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    defaults = {"efa_cluster": str(path), "efa_placement": "off", "rank": 0, "world_size": 4}
    return Namespace(**defaults | more)


def test_a_described_cluster_is_the_jobs(tmp_path, monkeypatch, capsys):
    host = socket.gethostname()
    args = job(tmp_path, f"nodes: [{{name: '{host}', gpus: 2}}, {{name: other, gpus: 2}}]")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(current.VARIABLE, "")
    current.configure(args)
    assert [node.name for node in current.current().nodes] == [host, "other"]
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "2 nodes, 4 GPUs, network paths not known" in said


MISFITS = {
    "nodes: [{name: HOST, gpus: 2}]": "describes 1 nodes with 2 ranks and this job has 4",
    "nodes: [{name: other, gpus: 2}, {name: HOST, gpus: 2}]": "it has HOST as node 1",
    "nodes: [{name: x, gpus: 2}, {name: y, gpus: 2}]": "it has no HOST",
    "nodes: [{name: HOST, gpus: 3}, {name: y, gpus: 1}]": "torchrun started 2 there",
}


@pytest.mark.parametrize("text", MISFITS)
def test_the_description_of_another_job_is_refused(tmp_path, monkeypatch, text):
    host = socket.gethostname()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(current.VARIABLE, "")
    with pytest.raises(EfaError, match=MISFITS[text].replace("HOST", host)):
        current.configure(job(tmp_path, text.replace("HOST", f"'{host}'")))


def test_where_hosts_are_placed_their_order_is_not_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv(current.VARIABLE, "")
    text = "nodes: [{name: x, gpus: 2}, {name: y, gpus: 2}]"
    current.configure(job(tmp_path, text, efa_placement="on"))
    assert current.current().nodes[0].name == "x"


def test_without_a_description_nothing_is_said(capsys):
    current.configure(Namespace(rank=0, world_size=1))
    assert capsys.readouterr().out == ""
    assert current.VARIABLE not in os.environ


TREE = Cluster(
    (
        Node("a", 8, ("top", "left"), "p5.48xlarge"),
        Node("b", 8, ("top", "right"), "p5.48xlarge", domain="d1"),
        Node("c", 8),
    ),
    (Node("s", 8, ("top", "left")),),
    "a test",
    far=Link(43e9, 2e-5),
)


def test_a_tree_names_switches_nodes_ranks_and_rails():
    text = show.as_text(TREE)
    assert "├─ top\n│  ├─ left\n│  │  ├─ node 0  a  ranks 0-7  p5.48xlarge, 8 GPUs, 32 efa" in text
    assert "spare  s  8 GPUs" in text
    assert "└─ node 2  c  ranks 16-23" in text
    assert "NVLink domain d1" in text
    assert "between nodes: 43 GB/s, 20 us" in text


def test_json_has_all_that_is_known():
    said = json.loads(show.as_json(TREE))
    assert said["nodes"][1]["ranks"] == [8, 15]
    assert said["far"] == {"peak": 43e9, "latency": 2e-5}
    assert said["spares"][0]["path"] == ["top", "left"]


@settings(deadline=None, max_examples=30)
@given(clusters())
def test_a_drawing_shows_every_node_and_switch(cluster):
    texts = [e.text for e in ET.fromstring(show.as_svg(cluster)).iter() if e.tag.endswith("text")]
    nodes = (*cluster.nodes, *cluster.spares)
    switches = {node.path[: i + 1] for node in nodes for i in range(len(node.path))}
    assert len(texts) == len(nodes) + len(switches)
    assert all(any(node.name in text for text in texts) for node in nodes)


def test_the_command_discovers_shows_and_places(tmp_path, capsys):
    hosts, out = tmp_path / "hosts", tmp_path / "c.yaml"
    hosts.write_text("b slots=8\na slots=8  # the second\n")
    assert cli.main(["topology", "discover", "--from", f"hostfile:{hosts}", "-o", str(out)]) == 0
    assert [node.name for node in describe.read(out).nodes] == ["b", "a"]
    assert cli.main(["topology", "show", "--from", str(out), "--svg", str(tmp_path / "t.svg")]) == 0
    assert "node 1  a  ranks 8-15" in capsys.readouterr().out
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    sizes = ["--tensor-model-parallel-size", "8"]
    written = tmp_path / "ordered"
    place = ["topology", "place", "--from", str(out), "--hostfile", str(written), *sizes]
    assert cli.main(place) == 0
    assert sorted(written.read_text().split()) == ["a", "b", "slots=8", "slots=8"]
    assert cli.main(["topology", "show", "--from", "carrier-pigeon"]) == 2
    assert "there is no such source" in capsys.readouterr().err


@pytest.mark.parametrize("kind", catalogue.kinds())
def test_every_machine_of_the_catalogue_is_whole(kind):
    known = catalogue.machine(kind)
    assert known.kind == kind
    assert known.fabric in ("efa", "infiniband", "roce", "tcp")
    if known.far is not None:
        assert known.far.peak * known.gpus * 8 <= known.network_gbit_s * 1e9
    if known.near is not None:
        assert known.far is None or known.near.peak > known.far.peak
    if not kind.startswith(("generic", "emulated")):
        assert known.sources
        assert known.gpus


def test_links_are_efas_as_measured():
    p5 = catalogue.machine("p5.48xlarge")
    assert p5.far.peak == pytest.approx(43e9)
    assert p5.near.peak / p5.far.peak > 8
    assert p5.peak["bf16"] == 989e12
