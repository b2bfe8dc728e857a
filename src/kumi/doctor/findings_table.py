"""Show the result of an examination: a table in the terminal, or plain data for --json."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kumi.doctor.examine import Examination

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def render_examination(examination: Examination) -> RenderableType:
    """Return the table: one row per check, below it the remedy if there is one, and a sentence about all of them."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("check", "verdict", "value", "limit"):
        table.add_column(name, overflow="fold", no_wrap=name in ("check", "verdict"))
    for finding in examination.findings:
        verdict = Text(finding.verdict, _COLORS[finding.verdict])
        table.add_row(finding.name, verdict, Text(finding.value), Text(finding.limit))
        if finding.remedy:
            table.add_row("", "", Text(f"-> {finding.remedy}", "italic"), "")
    return Group(table, Text(), Text(summary(examination)))


def summary(examination: Examination) -> str:
    """Return the result in one sentence."""
    by_verdict = {
        verdict: [finding.name for finding in examination.findings if finding.verdict == verdict]
        for verdict in ("fail", "warn", "ok", "skip")
    }
    seat = examination.seat
    where = "this machine" if seat.nodes == 1 else f"{seat.nodes} {seat.noun}s"
    parts = [f"{len(by_verdict['ok'])} ok"]
    parts += [f"{len(by_verdict['skip'])} skipped"] if by_verdict["skip"] else []
    parts += [
        f"{len(names)} {word}: {', '.join(names)}"
        for word, names in (("warned", by_verdict["warn"]), ("failed", by_verdict["fail"]))
        if names
    ]
    return f"{where}, {examination.seconds:.1f} s: {'; '.join(parts)}"


def plain_examination(examination: Examination) -> dict[str, Any]:
    """Return the result as plain data."""
    return {
        "verdict": examination.verdict,
        "nodes": {str(node): host for node, host in sorted(examination.hosts.items())},
        "seconds": round(examination.seconds, 3),
        "findings": [{**asdict(finding), "nodes": list(finding.nodes)} for finding in examination.findings],
    }
