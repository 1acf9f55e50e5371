"""Links between namespaces: a bridge in one of its own, a veth pair a node, both ends shaped.

Nothing here touches the host's network, and no `ip` or `tc` program is needed. Netlink sockets live
in the namespace of the thread that opens them, so each operation runs in a short thread that has
entered the namespace: no fork, and the caller's thread stays where it is.
"""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import TC_H_ROOT

from megatron.efa.emulate.rate import Rate, token_bucket
from megatron.efa.errors import EfaError

LINK = "eth0"
"""Name of a node's link inside the node."""
BRIDGE = "switch"
MTU = 9001  # jumbo frames, as in a VPC


class IsolationRefused(EfaError):
    """No namespaces or links may be made here; ranks can still run as plain local processes."""


@dataclass(frozen=True)
class LinkCounters:
    """What crossed a node's link since the node came up, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    def __sub__(self, earlier: "LinkCounters") -> "LinkCounters":
        return LinkCounters(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_packets - earlier.received_packets,
        )


def port(node: int) -> str:
    """Name of the switch's end of a node's link."""
    return f"port{node}"


def in_namespace[T](pid: int, work: Callable[[IPRoute], T]) -> T:
    """Result of `work`, run with a netlink socket in the network namespace of process `pid`."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def enter() -> None:
        try:
            handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                os.setns(handle, os.CLONE_NEWNET)
            finally:
                os.close(handle)
            with IPRoute() as netlink:
                outcome.append(work(netlink))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def build_switch(switch: int) -> None:
    """Make the bridge in the namespace of process `switch`."""

    def work(netlink: IPRoute) -> None:
        netlink.link(
            "add", ifname=BRIDGE, kind="bridge", br_stp_state=0, br_mcast_snooping=0, mtu=MTU
        )
        netlink.link("set", index=_index(netlink, BRIDGE), state="up")

    _wired("the switch", lambda: in_namespace(switch, work))


def connect(switch: int, node: int, pid: int, address: str, prefix: int) -> None:
    """Join the node whose first process is `pid` to the switch and give its end an address."""

    def switch_end(netlink: IPRoute) -> None:
        peer = {"ifname": LINK, "mtu": MTU, "net_ns_pid": pid}
        netlink.link("add", ifname=port(node), kind="veth", mtu=MTU, peer=peer)
        index = _index(netlink, port(node))
        netlink.link("set", index=index, master=_index(netlink, BRIDGE), state="up")

    def node_end(netlink: IPRoute) -> None:
        netlink.link("set", index=_index(netlink, "lo"), state="up")
        index = _index(netlink, LINK)
        netlink.addr("add", index=index, address=address, prefixlen=prefix)
        netlink.link("set", index=index, state="up")

    _wired(f"the link of node{node}", lambda: in_namespace(switch, switch_end))
    _wired(f"the link of node{node}", lambda: in_namespace(pid, node_end))


def shape(switch: int, node: int, pid: int, rate: Rate | None) -> None:
    """Hold both directions of a node's link to `rate`; None takes the shaping away."""
    for namespace, name in ((pid, LINK), (switch, port(node))):
        _wired(
            f"shaping the link of node{node}",
            lambda namespace=namespace, name=name: in_namespace(
                namespace, lambda netlink: _shape_end(netlink, name, rate)
            ),
        )


def _shape_end(netlink: IPRoute, name: str, rate: Rate | None) -> None:
    index = _index(netlink, name)
    if rate is not None:
        bucket = token_bucket(rate)
        netlink.tc(
            "replace", "tbf", index, rate=bucket.rate, burst=bucket.burst, limit=bucket.limit
        )
        return
    try:
        netlink.tc("del", index=index, parent=TC_H_ROOT)
    except NetlinkError as error:
        if error.code != errno.ENOENT:  # there was none
            raise


def set_link(switch: int, node: int, up: bool) -> None:
    """Plug or pull the cable: the switch's end goes down, the node's end loses its carrier."""
    _wired(
        f"the link of node{node}",
        lambda: in_namespace(
            switch,
            lambda netlink: netlink.link(
                "set", index=_index(netlink, port(node)), state="up" if up else "down"
            ),
        ),
    )


def counters(pid: int) -> LinkCounters:
    """Counters of the link of the node whose first process is `pid`."""
    try:
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    except OSError as error:
        raise EfaError(f"process {pid} is gone, and its node with it: {error.strerror}") from error
    for line in lines:
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            fields = [int(number) for number in numbers.split()]
            return LinkCounters(fields[8], fields[0], fields[9], fields[1])
    raise EfaError(f"process {pid} has no link {LINK}: its node was taken down")


def host_addresses() -> list[str]:
    """IPv4 addresses and routed networks of the host, as strings that `ipaddress` reads."""
    found = []
    with IPRoute() as netlink:
        for message in netlink.get_addr(family=2):
            found.append(f"{message.get_attr('IFA_ADDRESS')}/{message['prefixlen']}")
        for message in netlink.get_routes(family=2):
            if message.get_attr("RTA_DST") is not None and message["dst_len"] > 0:
                found.append(f"{message.get_attr('RTA_DST')}/{message['dst_len']}")
    return found


def _index(netlink: IPRoute, name: str) -> int:
    found = netlink.link_lookup(ifname=name)
    if not found:
        raise EfaError(f"there is no link {name} in its namespace: it was removed by someone else")
    return found[0]


def _wired(what: str, action: Callable[[], object]) -> None:
    """Run `action`; what the kernel refuses becomes a sentence with the option that avoids it."""
    try:
        action()
    except NetlinkError as error:
        if error.code == errno.EPERM:
            raise IsolationRefused(
                f"this machine refuses {what} (CAP_NET_ADMIN is needed)"
            ) from error
        lacking = error.code in (errno.ENOENT, errno.EOPNOTSUPP)
        hint = (
            "this kernel lacks veth, bridge or tbf (CONFIG_VETH, CONFIG_BRIDGE, "
            "CONFIG_NET_SCH_TBF); without tbf, --rate none still works"
            if lacking
            else "see the kernel's message"
        )
        raise EfaError(f"{what} was refused by the kernel ({error}): {hint}") from error
    except OSError as error:
        raise EfaError(f"{what} cannot be reached ({error}): its node has ended") from error
