"""Findings as one screen of text, failures first, or as JSON; and the exit code that follows."""

import json
import textwrap
from collections.abc import Iterable, Sequence

from megatron.efa.doctor.registry import LEVELS, Finding

CODES = {"warn": 1, "fail": 3}
"""Exit code by the worst level; 0 otherwise. 2 is a wrong call, as of every command here."""
_WIDTH = 100
_MOST_NODES = 4


def exit_code(findings: Iterable[Finding]) -> int:
    """0: no failure and no warning; 1: warnings; 3: failures."""
    return max((CODES.get(finding.level, 0) for finding in findings), default=0)


def merged(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Equal findings of several nodes as one, with the nodes' names; worst first."""
    groups: dict[Finding, list[str]] = {}
    for finding in findings:
        bare = Finding(**{**finding.as_dict(), "node": ""})
        groups.setdefault(bare, []).append(finding.node)
    worst_first = sorted(groups.items(), key=lambda item: -LEVELS.index(item[0].level))
    return [(finding, [name for name in nodes if name]) for finding, nodes in worst_first]


def as_json(findings: Sequence[Finding], title: str) -> str:
    """All findings, none merged, with the verdict."""
    said = {
        "job": title,
        "exit_code": exit_code(findings),
        "counts": {level: _count(findings, level) for level in reversed(LEVELS)},
        "findings": [finding.as_dict() for finding in findings],
    }
    return json.dumps(said, indent=1)


def as_text(findings: Sequence[Finding], title: str, nodes: int = 1, *, every: bool = False) -> str:
    """One screen: failures and warnings whole, then a line each for what is well or was not seen.

    `every` gives a line to each check that was well.
    """
    lines = [title]
    rows = merged(findings)
    for finding, names in rows:
        if finding.level in ("fail", "warn"):
            lines += _whole(finding, names, nodes)
    for finding, names in rows:
        if finding.level == "info":
            told = "; ".join(filter(None, (finding.what, finding.why, finding.do)))
            lines += _wrapped(f"info  {finding.check}: {told}{_on(names, nodes)}", "      ")
    lines += _unseen([(f, names) for f, names in rows if f.level == "skipped"], nodes)
    well = [f for f, _ in rows if f.level == "ok"]
    if every:
        lines += [f"ok    {f.check}: {f.what}" for f in well]
    elif well:
        names = dict.fromkeys(f.check for f in well)
        lines += _wrapped(f"ok ({len(names)}): {', '.join(names)}", "      ")
    return "\n".join([*lines, _verdict(findings)])


def _unseen(rows: list[tuple[Finding, list[str]]], nodes: int) -> list[str]:
    """What was not checked, and why: checks that share a reason share a line."""
    reasons: dict[str, list[str]] = {}
    for finding, names in rows:
        reasons.setdefault(finding.what, []).append(f"{finding.check}{_on(names, nodes)}")
    lines = [f"not checked ({sum(map(len, reasons.values()))}):"] if reasons else []
    for reason, unseen in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines += _wrapped(f"      {', '.join(unseen)}: {reason}", "        ")
    return lines


def _whole(finding: Finding, names: list[str], nodes: int) -> list[str]:
    where = f" [{finding.where}]" if finding.where else ""
    head = f"{finding.level.upper():5} {finding.check}: {finding.what}{where}{_on(names, nodes)}"
    lines = _wrapped(head, "      ")
    for label, text in (("why:", finding.why), ("do: ", finding.do)):
        if text:
            lines += _wrapped(f"      {label} {text}", "           ")
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False,
                         break_long_words=False)  # fmt: skip


def _on(names: list[str], nodes: int) -> str:
    if not names or nodes < 2:
        return ""
    if len(set(names)) == nodes:
        return f" on all {nodes} nodes"
    shown = ", ".join(names[:_MOST_NODES])
    more = f" and {len(names) - _MOST_NODES} more" if len(names) > _MOST_NODES else ""
    return f" on {shown}{more}"


def _verdict(findings: Sequence[Finding]) -> str:
    failures, warnings = _count(findings, "fail"), _count(findings, "warn")
    if failures:
        return f"verdict: {_many(failures, 'failure')}, {_many(warnings, 'warning')}: do not start"
    if warnings:
        return f"verdict: no failure, {_many(warnings, 'warning')}"
    seen = _count(findings, "ok")
    return f"verdict: nothing wrong in what {_many(seen, 'check')} saw" if seen else (
        "verdict: nothing could be checked here"
    )  # fmt: skip


def _count(findings: Sequence[Finding], level: str) -> int:
    return len({(f.check, f.what) for f in findings if f.level == level})


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count != 1 else ''}"
