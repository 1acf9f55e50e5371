"""Times that overlap are counted once: a rank's step by axis and tier."""

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.efa.traffic.record import Interval, Step, Timed

NODE, FABRIC = "node", "fabric"


@dataclass
class Row:
    """One axis on one tier, of one rank in one step."""

    bytes: float = 0.0
    """Sent by this rank."""
    messages: float = 0.0
    timed_bytes: float = 0.0
    """Those of transfers of which is known when they ended."""
    seconds: float = 0.0
    """In which at least one of those was under way."""
    exposed: float = 0.0
    """In which nothing else could be done."""


def rows_of(step: Step) -> dict[tuple[str, str], Row]:
    """By axis and tier. Time waited while a transfer of the axis to another node was under way is
    the fabric's; what was waited besides is the node's."""
    rows: dict[tuple[str, str], Row] = {}
    for axis in sorted({each.axis for each in (*step.transfers, *step.waits)}):
        transfers = [each for each in step.transfers if each.axis == axis]
        near = _row([(t, t.sent.node_bytes, t.sent.node_messages) for t in transfers], NODE)
        far = _row([(t, t.sent.fabric_bytes, t.sent.fabric_messages) for t in transfers], FABRIC)
        waits = _union(wait for wait in step.waits if wait.axis == axis)
        far.exposed = length(shared(waits, _union(each for each in transfers if each.far)))
        near.exposed = max(0.0, length(waits) - far.exposed)
        for tier, row in ((NODE, near), (FABRIC, far)):
            if row.bytes or row.exposed > 0:
                rows[axis, tier] = row
    return rows


def _row(sent: list[tuple[Timed, float, float]], tier: str) -> Row:
    """Of transfers with their bytes and messages on one tier."""
    known = [(each, size) for each, size, _ in sent if size and each.end is not None]
    paired = [each for each, _, _ in sent if each.paired and each.far == (tier == FABRIC)]
    every = sum(size for _, size, _ in sent)
    return Row(
        every,
        sum(messages for _, _, messages in sent),
        every if paired else sum(size for _, size in known),
        length(_union([*(each for each, _ in known), *paired])),
    )


def in_flight(step: Step, tier: str) -> list[Interval]:
    """When a transfer of any axis was under way on `tier`; those on both are the fabric's."""
    far = tier == FABRIC
    return _union(
        each
        for each in step.transfers
        if (each.paired and each.far == far)
        or (each.sent.fabric_bytes if far else each.sent.node_bytes and not each.sent.fabric_bytes)
    )


def _union(timed: Iterable[Timed]) -> list[Interval]:
    return union((each.start, each.end) for each in timed if each.end is not None)


def exposed(step: Step) -> float:
    """Seconds of the step in which this rank waited for any transfer."""
    return length(_union(step.waits))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, in intervals that lie apart, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def shared(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Points of both; each in intervals that lie apart, in order."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(apart: Iterable[Interval]) -> float:
    """Seconds of intervals that lie apart."""
    return sum(end - start for start, end in apart)
