"""Nodes reach each other over links of the asked rate and nothing else, and vanish with their
owner.
"""

import os
import signal
import subprocess
import sys
import time
import uuid

import observe
import pytest

from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.rate import parse_rate
from megatron.efa.errors import EfaError

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

RECEIVE = """
import socket, sys, time
server = socket.create_server(("", 5000))
server.settimeout(20)
print("ready", flush=True)
peer, _ = server.accept()
peer.settimeout(20)
got = len(peer.recv(1 << 20))
start = time.perf_counter()
while data := peer.recv(1 << 20):
    got += len(data)
print(got, time.perf_counter() - start)
"""
DRAIN = """
import socket, threading
server = socket.create_server(("", 5000))
print("ready", flush=True)
peers = [server.accept()[0] for _ in range(2)]
print("both", flush=True)
def drain(peer):
    while peer.recv(1 << 20):
        pass
for peer in peers:
    threading.Thread(target=drain, args=[peer]).start()
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000), timeout=20)
peer.sendall(bytes(int(sys.argv[2])))
"""
PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), timeout=1)
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("unreachable")
"""


def cluster(*args, **kwargs):
    kwargs.setdefault("name", f"test-{uuid.uuid4().hex[:12]}")
    return EmulatedCluster(*args, **kwargs)


def transfer(nodes, source, target, size):
    """Bits per second at which `size` bytes went from one node to another."""
    streams = {"stdout": subprocess.PIPE, "text": True}
    with nodes.popen(target, [sys.executable, "-c", RECEIVE], **streams) as receiver:
        assert receiver.stdout.readline() == "ready\n"
        sender = [sys.executable, "-c", SEND, nodes.nodes[target].hostname, str(size)]
        assert nodes.run(source, sender, timeout=30).returncode == 0
        got, seconds = receiver.stdout.read().split()
    assert int(got) == size
    return size * 8 / float(seconds)


def reaches(nodes, source, address):
    probe = nodes.run(source, [sys.executable, "-c", PROBE, address])
    return probe.stdout.strip() == "reached"


def test_nodes_have_names_memory_and_processes_of_their_own_and_the_host_is_not_touched():
    before = observe.host_links()
    with cluster(3) as nodes:
        look = "hostname; echo $$; ls /dev/shm | wc -l; touch /dev/shm/mine; ls /sys/class/net"
        seen = [nodes.run(node, ["sh", "-c", look]).stdout.split() for node in range(3)]
        assert [words[0] for words in seen] == ["node0", "node1", "node2"]
        for words in seen:
            assert int(words[1]) < 50  # few processes were ever in this PID namespace
            assert words[2] == "0"
        assert all(reaches(nodes, 0, name) for name in ("node1", "node2", "node0"))
        assert observe.host_links() == before
        gateway = nodes.run(0, ["cat", "/proc/net/route"]).stdout.splitlines()[1:]
        assert [line.split()[0] for line in gateway] == ["eth0"]  # the subnet, and no way out


@pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
def test_a_link_holds_its_rate_in_both_directions(rate):
    asked = parse_rate(rate).bits_per_second
    size = asked // 8  # a second
    with cluster(2, parse_rate(rate)) as nodes:
        for source, target in ((0, 1), (1, 0)):
            before = nodes.counters()
            assert observe.at_rate(transfer(nodes, source, target, size), asked)
            moved = [now - then for now, then in zip(nodes.counters(), before, strict=True)]
            assert moved[source].sent_bytes == pytest.approx(size, rel=0.02)
            assert moved[target].received_bytes == moved[source].sent_bytes
            assert moved[source].received_bytes < size * 0.02


def test_many_senders_share_the_link_of_the_one_receiver():
    with cluster(3, parse_rate("200mbit")) as nodes:
        drain = [sys.executable, "-c", DRAIN]
        with nodes.popen(0, drain, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            send = [sys.executable, "-c", SEND, "node0", str(10**9)]
            senders = [nodes.popen(node, send) for node in (1, 2)]
            assert receiver.stdout.readline() == "both\n"
            before, start = nodes.counters(), time.monotonic()
            time.sleep(1.5)
            after, seconds = nodes.counters(), time.monotonic() - start
            for process in (*senders, receiver):
                process.kill()
                process.wait()
    moved = [now - then for now, then in zip(after, before, strict=True)]
    assert observe.at_rate(moved[0].received_bytes * 8 / seconds, 200e6)
    assert min(moved[1].sent_bytes, moved[2].sent_bytes) > 0


def test_a_link_can_be_slowed_pulled_and_plugged_while_the_cluster_runs():
    with cluster(2, parse_rate("1gbit")) as nodes:
        nodes.set_rate(1, parse_rate("80mbit"))
        assert observe.at_rate(transfer(nodes, 0, 1, 10_000_000), 80e6)
        nodes.set_rate(1, None)
        assert observe.at_rate(transfer(nodes, 1, 0, 100_000_000), 1e9)  # node0's
        nodes.set_link(1, up=False)
        assert not reaches(nodes, 0, "node1")
        nodes.set_link(1, up=True)
        assert reaches(nodes, 0, "node1")


def test_a_command_ends_as_it_would_without_a_node_around_it(tmp_path):
    with cluster(1) as nodes:
        assert nodes.run(0, ["sh", "-c", "exit 7"]).returncode == 7
        assert nodes.run(0, ["sh", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV
        assert nodes.run(0, ["no-such-program"]).returncode == 127
        assert nodes.run(0, ["pwd"], cwd=tmp_path).stdout.strip() == str(tmp_path)
        assert nodes.run(0, ["env"], env={"ONLY": "this"}).stdout.splitlines()[0] == "ONLY=this"
        with pytest.raises(subprocess.TimeoutExpired):
            nodes.run(0, ["sleep", "100"], timeout=0.3)
        sleeper = nodes.popen(0, ["sleep", "100"])
        time.sleep(0.3)
        sleeper.terminate()
        assert sleeper.wait(timeout=5) == -signal.SIGTERM


def test_closing_a_cluster_ends_what_runs_on_it_also_what_hides():
    with cluster(2) as nodes:
        nodes.popen(1, ["sh", "-c", "setsid sleep 1000 & trap '' TERM INT; sleep 1000; sleep 1000"])
        time.sleep(0.3)
        spaces = observe.namespaces(nodes.name)
        assert len(spaces) == 3  # the switch and two nodes
    assert observe.wait_until_gone(nodes.name, spaces) < 1
    assert not observe.claimed(nodes.name).exists()


def test_clusters_at_the_same_time_do_not_see_each_other():
    with cluster(1) as first, cluster(1) as second:
        assert first.nodes[0].address != second.nodes[0].address
        assert reaches(first, 0, first.nodes[0].address)
        assert not reaches(first, 0, second.nodes[0].address)
        first.close()
        assert reaches(second, 0, second.nodes[0].address)


def test_a_killed_owner_takes_its_nodes_along_and_the_next_start_removes_its_claim_alone():
    owner = """
import sys, time
from megatron.efa.emulate.cluster import EmulatedCluster
with EmulatedCluster(2, name=sys.argv[1]) as nodes:
    nodes.popen(1, ["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    print("up", flush=True)
    time.sleep(1000)
"""
    name = f"test-{uuid.uuid4().hex[:12]}"
    with cluster(1) as living:
        command = [sys.executable, "-c", owner, name]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"up\n"
            time.sleep(0.3)
            spaces = observe.namespaces(name)
            assert len(spaces) == 3
            process.kill()
        observe.wait_until_gone(name, spaces)
        assert observe.claimed(name).exists()
        with cluster(1, name=name) as next_one:  # the name is free, and its claim is a new one
            assert next_one.run(0, ["hostname"]).stdout == "node0\n"
        assert not observe.claimed(name).exists()
        assert living.run(0, ["hostname"]).stdout == "node0\n"


def test_a_node_that_was_killed_is_named_and_no_other_process_is_taken_for_it():
    with cluster(2) as nodes:
        os.kill(nodes.nodes[1].pid, signal.SIGKILL)
        time.sleep(0.3)
        for action in (lambda: nodes.run(1, ["true"]), lambda: nodes.set_rate(1, None)):
            with pytest.raises(EfaError, match=r"node1 .* has ended"):
                action()
        assert nodes.run(0, ["true"]).returncode == 0


@pytest.mark.parametrize("capability", ["sys_admin", "net_admin"])
def test_root_without_the_capability_is_told_what_is_refused(capability):
    code = """
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.network import IsolationRefused
try:
    EmulatedCluster(2).__enter__()
except IsolationRefused as refusal:
    print(refusal)
"""
    lacking = ["setpriv", f"--bounding-set=-{capability}"]
    done = subprocess.run([*lacking, sys.executable, "-c", code], capture_output=True, text=True)
    assert "refuses" in done.stdout, done.stderr
