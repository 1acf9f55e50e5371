"""What the hardware and the kernel counted: EFA's counters and TCP's repeats, before and after."""

import re
from typing import TYPE_CHECKING

from megatron.efa.doctor.context import devices

if TYPE_CHECKING:
    from megatron.efa.doctor.host import Host

BYTES = ("tx_bytes", "send_bytes", "rdma_read_bytes", "rdma_write_bytes", "recv_bytes")
"""Any of these must rise when EFA carries traffic; not every generation has all."""
TROUBLE = (
    "retrans_timeout_events",
    "unresponsive_remote_events",
    "impaired_remote_conn_events",
    "rx_drops",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
)
"""What NVSentinel counts as degradation; from Nitro v4 on (not on p4d)."""


def read(host: "Host") -> dict[str, int]:
    """Sums over the node's EFA devices, and TCP's segments sent and repeated, by name."""
    sums: dict[str, int] = {}
    for device in devices(host):
        folder = f"/sys/class/infiniband/{device}/ports/1/hw_counters"
        for name in host.names(folder):
            if name in BYTES or name in TROUBLE:
                text = host.text(f"{folder}/{name}") or ""
                sums[name] = sums.get(name, 0) + (int(text) if text.isdecimal() else 0)
    rows = re.findall(r"^Tcp: (.+)$", host.text("/proc/net/snmp") or "", re.MULTILINE)
    if len(rows) == 2:
        tcp = dict(zip(rows[0].split(), rows[1].split(), strict=False))
        sums |= {"tcp_sent": int(tcp["OutSegs"]), "tcp_repeated": int(tcp["RetransSegs"])}
    return sums


def between(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was counted from `before` to `after`."""
    return {name: value - before.get(name, 0) for name, value in after.items()}
