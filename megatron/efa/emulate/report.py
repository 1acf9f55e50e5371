"""What crossed the links, for people and for programs."""

import json
import os
from pathlib import Path

from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.job import Outcome
from megatron.efa.errors import EfaError


def table(cluster: EmulatedCluster, outcome: Outcome) -> str:
    """Bytes sent and received by each node, and per second over the whole run (MB = 10^6 bytes)."""
    if outcome.links is None and cluster.isolated:
        return f"{outcome.seconds:.1f} s; a node ended during the run, and its counters with it"
    if outcome.links is None:
        return (
            f"{outcome.seconds:.1f} s; bytes between nodes were not counted: plain local processes "
            "have no links"
        )
    rate = "unshaped" if cluster.rate is None else f"{cluster.rate} each way"
    lines = [f"{outcome.seconds:.1f} s; links {rate}; the whole run, start-up included:"]
    lines.append(f"{'node':<10}{'sent MB':>12}{'MB/s':>10}{'received MB':>14}{'MB/s':>10}")
    for node, link in zip(cluster.nodes, outcome.links, strict=True):
        sent, received = link.sent_bytes / 1e6, link.received_bytes / 1e6
        lines.append(
            f"{node.hostname:<10}{sent:>12.2f}{sent / outcome.seconds:>10.2f}"
            f"{received:>14.2f}{received / outcome.seconds:>10.2f}"
        )
    return "\n".join(lines)


def as_json(cluster: EmulatedCluster, ranks_per_node: int, outcome: Outcome) -> dict:
    """The run as plain data: bytes are integers, rates bits per second, times seconds."""
    failure = outcome.failure
    return {
        "name": cluster.name,
        "nodes": len(cluster.nodes),
        "ranks_per_node": ranks_per_node,
        "isolated": cluster.isolated,
        "rate_bits_per_second": None if cluster.rate is None else cluster.rate.bits_per_second,
        "seconds": outcome.seconds,
        "exit_code": outcome.exit_code,
        "failure": None
        if failure is None
        else {
            "node": failure.node,
            "rank": failure.rank,
            "local_rank": failure.local_rank,
            "code": failure.code,
            "log": str(failure.log),
        },
        "links": None
        if outcome.links is None
        else [
            {
                "node": node.index,
                "hostname": node.hostname,
                "sent_bytes": link.sent_bytes,
                "received_bytes": link.received_bytes,
                "sent_packets": link.sent_packets,
                "received_packets": link.received_packets,
            }
            for node, link in zip(cluster.nodes, outcome.links, strict=True)
        ],
    }


def check_writable(path: Path) -> None:
    """Raise EfaError, before the run rather than after it, if `write_json` cannot write there."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise EfaError(f"--json {path}: there is no directory {folder}")
    if path.is_dir():
        raise EfaError(f"--json {path} is a directory: give the name of a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EfaError(f"--json {path}: the directory {folder} is not writable")


def write_json(path: Path, content: dict) -> None:
    """Write aside, then rename: whoever reads the file sees all of it. Raises EfaError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(content, indent=2) + "\n")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise EfaError(f"--json {path} cannot be written: {error.strerror}") from error
