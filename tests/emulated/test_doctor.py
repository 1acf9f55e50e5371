"""The doctor on emulated nodes: what is wrong with the network is found and named, in time."""

import contextlib
import io
import json
import os
import uuid

import pytest
import torch
from pyroute2 import IPRoute

from megatron.efa import cli
from megatron.efa.doctor.cli import checks
from megatron.efa.doctor.network import probe, run
from megatron.efa.emulate import network
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.forked import run_forked
from megatron.efa.emulate.rate import parse_rate

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
NODES = 4
checks()  # imported once, before ranks are forked
LINKS = "reachability,link-mtu,link-loss,link-latency,link-bandwidth,efa-traffic"


@pytest.fixture(scope="module")
def cluster():
    name = f"test-{uuid.uuid4().hex[:12]}"
    with EmulatedCluster(NODES, parse_rate("200mbit"), name=name) as nodes:
        yield nodes


def doctor(cluster, logs, *options, before=None):
    """[(exit code, output)] by node of `megatron-efa doctor` on all nodes."""

    def work():
        torch.set_num_threads(1)
        if before:
            before(int(os.environ["RANK"]))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = cli.main(["doctor", "--limit", "100", *options])
        return code, said.getvalue()

    return run_forked(cluster, 1, work, logs, timeout_s=150)


def findings(said, level):
    """{check: what} of the findings of one level in JSON output."""
    return {f["check"]: f["what"] for f in json.loads(said)["findings"] if f["level"] == level}


def links(cluster, logs):
    (code, said), *others = doctor(
        cluster, logs, "--json", "--only", LINKS, "--wait", "20", "--megabytes", "2"
    )
    assert all(other == (code, "") for other in others), "one node prints, all end with its code"
    return code, said


def test_on_healthy_nodes_nothing_is_wrong(cluster, tmp_path):
    code, said = links(cluster, tmp_path)
    assert code == 0, said
    assert set(findings(said, "ok")) == set(LINKS.split(","))
    assert "6 pairs" in findings(said, "ok")["link-bandwidth"]
    assert "9001 bytes" in findings(said, "ok")["link-mtu"]


def test_a_slow_link_is_named(cluster, tmp_path):
    cluster.set_rate(2, parse_rate("40mbit"))
    try:
        code, said = links(cluster, tmp_path)
    finally:
        cluster.set_rate(2, parse_rate("200mbit"))
    assert code == 3
    slow = findings(said, "fail")
    assert set(slow) == {"link-bandwidth"}
    assert slow["link-bandwidth"].startswith("node2: ")


def test_a_lossy_link_is_named(cluster, tmp_path):
    # No netem here: a queue of two packets drops whatever comes in a burst.
    def choke(netlink):
        index = netlink.link_lookup(ifname=network.LINK)[0]
        netlink.tc("replace", "tbf", index, rate=3_000_000, burst=18_200, limit=18_300)

    network.in_namespace(cluster.nodes[1].pid, choke)
    try:
        code, said = links(cluster, tmp_path)
    finally:
        cluster.set_rate(1, parse_rate("200mbit"))
    assert code == 3
    assert findings(said, "fail")["link-loss"].startswith("node1 loses packets")


def test_a_wrong_mtu_is_named(cluster, tmp_path):
    def change(size):
        def work(netlink):
            netlink.link("set", index=netlink.link_lookup(ifname=network.LINK)[0], mtu=size)

        network.in_namespace(cluster.nodes[3].pid, work)

    change(1500)
    try:
        code, said = links(cluster, tmp_path)
    finally:
        change(network.MTU)
    assert code == 3
    assert findings(said, "fail")["link-mtu"] == "node3 has an MTU of 1500, the others 9001"


def test_two_nodes_that_do_not_reach_each_other_are_named(cluster, tmp_path):
    address = cluster.nodes[2].address
    route = ["ip", "route", "add", "blackhole", f"{address}/32"]
    cluster.run(1, route)
    try:
        code, said = links(cluster, tmp_path)
    finally:
        cluster.run(1, ["ip", "route", "del", *route[3:]])
    assert code == 3
    assert findings(said, "fail")["reachability"].startswith("the link node1 - node2")


def test_an_unreachable_node_is_named_in_time_and_says_itself_what_it_lacks(cluster, tmp_path):
    cluster.set_link(3, up=False)
    try:
        done = doctor(cluster, tmp_path, "--only", "nodes,shm", "--wait", "8")
    finally:
        cluster.set_link(3, up=True)
    assert [code for code, _ in done] == [3] * NODES
    assert "3 of 4 nodes up: node3 did not answer within 8 s" in done[0][1]
    assert "rank 0 did not answer" in done[3][1]


def test_a_node_whose_cable_is_pulled_in_the_middle_is_named_and_holds_up_nobody(cluster, tmp_path):
    def pull(*_):
        with IPRoute() as netlink:
            netlink.link("set", index=netlink.link_lookup(ifname=network.LINK)[0], state="down")
        return probe.Seen(False, "the cable is pulled")

    def before(rank):
        run._LOOK_S, probe._CONNECT_S = 5.0, 1.0
        if rank == 3:
            run.look = pull

    try:
        done = doctor(cluster, tmp_path, "--json", "--only", f"nodes,{LINKS}", "--wait", "20",
                      "--megabytes", "2", before=before)  # fmt: skip
    finally:
        cluster.set_link(3, up=True)
        network.in_namespace(
            cluster.nodes[3].pid,
            lambda n: n.link("set", index=n.link_lookup(ifname=network.LINK)[0], state="up"),
        )
    assert [code for code, _ in done] == [3] * NODES
    found = findings(done[0][1], "fail")
    assert found["nodes"] == "3 of 4 nodes up: node3 fell silent"
    assert found["reachability"] == "node3 cannot be reached"
    assert "3 pairs" in findings(done[0][1], "ok")["link-bandwidth"]
    assert "without rank 3" in done[3][1]
