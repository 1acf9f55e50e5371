"""Hosts change places before training starts, and training computes what it did before."""

from tests.parity.layouts import LAYOUTS

STEPS = 3
# By name each pair of hosts, an EP group, would lie under two switches; so a and d are paired, b
# and c. The last rank, which prints the losses, then is on c or b, and no longer on d.
HOSTS = [["a", ["x"]], ["b", ["y"]], ["c", ["y"]], ["d", ["x"]]]


def test_placed_hosts_train_to_the_same_bits(ours, plain):
    ranks, flags = LAYOUTS["PP2 x EP2"]
    on = [*flags, "--efa-groups", "--efa-placement", "on"]
    placed = ours.run(ranks, on, STEPS, per_node=1, hosts=HOSTS).checked()
    assert placed.bits == plain.run(ranks, flags, STEPS).checked().bits
    assert "hosts moved" in placed.logs[0]
    printing = [process for process, log in enumerate(placed.logs) if "lm loss" in log]
    assert printing in ([1], [2])
    assert sum("4 nodes, from test" in log for log in placed.logs) == 1
