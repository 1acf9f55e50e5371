"""From measurements to names: who is blamed for slow, lossy, late and missing links."""

import itertools
import socket
from dataclasses import replace

import pytest
from doctor_host import bare, healthy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.efa.doctor.network import counters, judge, probe
from megatron.efa.doctor.network.schedule import partner, rounds
from megatron.efa.doctor.registry import Skip

NAMES = judge.Names({i: f"node{i}" for i in range(8)})
settings.register_profile("calm", deadline=None, suppress_health_check=list(HealthCheck))
CALM = settings.get_profile("calm")
SEEN = probe.Seen(True, "", 0.1, 0, 9001, 9001)


@given(st.integers(2, 40))
@CALM
def test_every_pair_meets_once_and_no_node_is_in_two_pairs_of_a_round(nodes):
    made = rounds(nodes)
    assert len(made) == nodes - 1 + nodes % 2
    for pairs in made:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    met = [pair for pairs in made for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(nodes), 2))


@given(st.integers(3, 300), st.integers(1, 16))
@settings(CALM, max_examples=30)
def test_with_fewer_rounds_every_node_still_meets_that_many(nodes, most):
    made = rounds(nodes, most)
    assert len(made) == min(most, len(rounds(nodes)))
    for node in range(nodes):
        met = [p for pairs in made if (p := partner(pairs, node)) is not None]
        assert len(set(met)) == len(met) >= len(made) - 1  # an odd one out rests once


def all_pairs(nodes):
    return list(itertools.combinations(range(nodes), 2))


@given(st.integers(4, 12), st.data())
@CALM
def test_a_node_whose_every_pair_is_bad_is_blamed_alone(nodes, data):
    node = data.draw(st.integers(0, nodes - 1))
    bad = [pair for pair in all_pairs(nodes) if node in pair]
    assert judge.blame(bad, all_pairs(nodes)) == ([node], [])


def test_a_single_bad_pair_is_the_links_fault():
    assert judge.blame([(2, 5)], all_pairs(8)) == ([], [(2, 5)])
    assert judge.blame([(1, 0)], [(0, 1)]) == ([], [(0, 1)])


def test_two_bad_nodes_and_a_link_are_told_apart():
    bad = [p for p in all_pairs(8) if 3 in p or 6 in p] + [(0, 1)]
    ends, links = judge.blame(bad, all_pairs(8))
    assert sorted(ends) == [3, 6]
    assert links == [(0, 1)]


def rates(nodes, rails=1, rate=10e9, **slow):
    """Pairs of (node, rail) at `rate`, but for node=(n, value) or rail=(n, r, value)."""
    made = {}
    for (a, b), r in itertools.product(all_pairs(nodes), range(rails)):
        value = rate
        if "node" in slow and slow["node"][0] in (a, b):
            value = slow["node"][1]
        if "rail" in slow and slow["rail"][0] in (a, b) and slow["rail"][1] == r:
            value = slow["rail"][2]
        made[((a, r), (b, r))] = value
    return made


def test_equal_links_are_well_with_their_number_and_rate():
    (finding,) = judge.bandwidth(rates(4, 8), NAMES)
    assert (finding.level, finding.what) == ("ok", "48 pairs, median 10 GB/s, slowest 10 GB/s")


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_one_slow_node_is_named_with_its_rate_and_its_share(nodes):
    (finding,) = judge.bandwidth(rates(nodes, node=(1, 4e9)), NAMES)
    assert (finding.level, finding.what) == ("fail", "node1: 4 GB/s, the median is 10 GB/s (40%)")
    assert finding.do


def test_a_node_somewhat_slow_is_a_warning():
    (finding,) = judge.bandwidth(rates(4, node=(1, 7e9)), NAMES)
    assert finding.level == "warn"


def test_one_slow_rail_is_named_and_its_node_is_not_blamed_for_the_others():
    (finding,) = judge.bandwidth(rates(4, 8, rail=(2, 5, 1e9)), NAMES)
    assert finding.what == "rail 5 of node2: 1 GB/s, the median is 10 GB/s (10%)"


def test_one_slow_link_is_named_by_both_ends():
    made = rates(4)
    made[((0, 0), (3, 0))] = 2e9
    (finding,) = judge.bandwidth(made, NAMES)
    assert finding.what.startswith("the link node0 - node3: 2 GB/s")


def test_a_burst_that_did_not_end_is_a_failure_of_its_node():
    (finding,) = judge.bandwidth(rates(4, node=(2, None)), NAMES)
    assert (finding.level, finding.what) == ("fail", "node2: the burst did not end in time")


def test_a_whole_fleet_that_is_slow_is_told_by_the_catalogue():
    (finding,) = judge.bandwidth(rates(4, rate=1e9), NAMES, expected=43e9)
    assert finding.level == "warn"
    assert "TCP instead of EFA" in finding.why


def test_nothing_measured_is_not_well():
    with pytest.raises(Skip):
        judge.bandwidth({((0, 0), (1, 0)): None}, NAMES)
    with pytest.raises(Skip):
        judge.latency({}, NAMES)


def views(nodes, **odd):
    """What each node saw of each other; `odd` maps "a_b" to what differs in that direction."""
    made = {pair: SEEN for pair in itertools.permutations(range(nodes), 2)}
    for key, change in odd.items():
        a, b = map(int, key.strip("_").split("_"))
        made[(a, b)] = replace(made[(a, b)], **change)
    return {pair: view.as_dict() for pair, view in made.items()}


def test_what_is_well_is_said_with_its_evidence():
    seen = views(4)
    for judged, words in (
        (judge.reachability(seen, NAMES), "12 connections"),
        (judge.mtu(seen, NAMES), "9001 bytes"),
        (judge.loss(seen, NAMES), "0 of 768"),
    ):
        assert [f.level for f in judged] == ["ok"]
        assert words in judged[0].what


def test_a_path_that_lets_no_large_packets_through_is_named_though_all_mtus_agree():
    short = {"mtu": 1500}
    (finding,) = judge.mtu(views(4, _2_0=short, _2_1=short, _2_3=short), NAMES)
    assert finding.level == "fail"
    assert finding.what == "packets above 1500 bytes do not arrive at or from node2"


def test_filtered_datagrams_are_said_to_be_unseen_not_well():
    silent = {"milliseconds": None, "route_mtu": None, "mtu": None}
    seen = views(2, _0_1=silent, _1_0=silent)
    for judged in (judge.mtu, judge.loss):
        with pytest.raises(Skip, match="UDP is filtered"):
            judged(seen, NAMES)


def test_one_lost_datagram_is_chance_and_more_are_a_loss():
    assert judge.loss(views(4, _0_1={"lost": 1}), NAMES)[0].level == "ok"
    (finding,) = judge.loss(views(4, _0_1={"lost": 9}), NAMES)
    assert finding.what == "the link node0 - node1 loses packets, 9 of 64 in the worst burst"


def test_a_late_node_is_a_warning():
    times = {pair: 0.05 for pair in itertools.permutations(range(4), 2)}
    times |= {pair: 9.0 for pair in times if 2 in pair}
    (finding,) = judge.latency(times, NAMES)
    assert (finding.level, finding.what) == ("warn", "node2: up to 9 ms, the median is 0.05 ms")


def test_a_straggling_gpu_is_named():
    speeds = {(f"node{n}", g): 700e12 for n in range(2) for g in range(8)}
    assert judge.compute(speeds, "cuda")[0].level == "ok"
    speeds[("node1", 3)] = 500e12
    (finding,) = judge.compute(speeds, "cuda")
    assert finding.what == "GPU 3 of node1 computes at 71% of the median"


def test_efa_counters_that_stay_flat_while_nccl_sends_are_tcp():
    counted = {"node0": {"tx_bytes": 10**9}, "node1": {"tx_bytes": 0, "rdma_write_bytes": 0}}
    (finding,) = judge.traffic(counted, sent=True)
    assert finding.level == "fail"
    assert "node1: no EFA counter rose" in finding.what
    assert "TCP" in finding.why
    assert judge.traffic({"node0": {"tx_bytes": 10**9}}, sent=True)[0].level == "ok"


def test_retransmit_timeouts_are_failures_and_drops_warnings():
    (finding,) = judge.traffic({"node0": {"tx_bytes": 1, "retrans_timeout_events": 2}}, True)
    assert (finding.level, finding.what) == ("fail", "node0: retrans_timeout_events +2")
    (finding,) = judge.traffic({"node0": {"tx_bytes": 1, "rx_drops": 2}}, True)
    assert finding.level == "warn"


def test_tcp_that_repeats_itself_is_a_warning():
    counts = {"tcp_sent": 1000, "tcp_repeated": 40}
    (finding,) = judge.traffic({"node0": counts}, sent=False)
    assert (finding.level, finding.where) == ("warn", "/proc/net/snmp")


def test_counters_are_sums_over_devices_and_tcps_own(tmp_path):
    host = healthy(tmp_path)
    for i in (0, 5):
        folder = f"/sys/class/infiniband/rdmap{i}s0/ports/1/hw_counters"
        host.put(f"{folder}/tx_bytes", "100\n")
        host.put(f"{folder}/retrans_timeout_events", "1\n")
    host.put("/proc/net/snmp", "Tcp: InSegs OutSegs RetransSegs\nTcp: 5 70 3\n")
    before = counters.read(host)
    assert before == {
        "tx_bytes": 200,
        "retrans_timeout_events": 2,
        "tcp_sent": 70,
        "tcp_repeated": 3,
    }
    host.put("/sys/class/infiniband/rdmap0s0/ports/1/hw_counters/tx_bytes", "150\n")
    assert counters.between(before, counters.read(host))["tx_bytes"] == 50


def test_a_machine_without_efa_has_tcps_counters_alone(tmp_path):
    assert counters.read(bare(tmp_path)) == {}


def test_a_peer_on_loopback_answers_loses_nothing_and_takes_the_largest_packet():
    with probe.Echo("127.0.0.1") as echo:
        seen = probe.look("127.0.0.1", "127.0.0.1", echo.ports)
    assert seen.reached
    assert seen.lost == 0
    assert seen.milliseconds > 0
    assert seen.mtu == min(seen.route_mtu, 65000)


def test_a_port_that_nobody_listens_on_is_not_reached_and_says_why():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    seen = probe.look("127.0.0.1", "127.0.0.1", (port, port))
    assert not seen.reached
    assert "refused" in seen.reason
