"""The page of a report, in Markdown: a table of the parts, and one of each part's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ABOUT = """# Report of `kumi doctor --gpu`

{summary}

It has no names of users or machines, no paths, serial numbers or addresses, and no values of environment variables:
what may be one of these is replaced by `[removed]`. Please read it before you send it; docs/gpu-report.md says where
to.
"""


def page(report: Mapping[str, Any]) -> str:
    """Return the page of `report`, the plain data of a `Report`."""
    parts: Sequence[Mapping[str, Any]] = report["parts"]
    lines = [_ABOUT.format(summary=_summary(report)), "## Parts", ""]
    overview = [
        {"part": part["name"], "status": part["status"], "s": part["seconds"], "why": part["reason"]} for part in parts
    ]
    lines += [*_table(overview), ""]
    for part in parts:
        lines += [f"## {_title(part['name'])}", "", part["needs"], ""]
        if part["reason"]:
            lines += [f"**{_title(part['status'])}**: {_cell(part['reason'])}", ""]
        lines += [*(f"- at `{place}`" for place in part["where"]), *([""] if part["where"] else [])]
        if part["rows"]:
            lines += [*_table(part["rows"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _title(name: str) -> str:
    return name[0].upper() + name[1:]


def _summary(report: Mapping[str, Any]) -> str:
    """Return the result in sentences."""
    counts: dict[str, list[str]] = {}
    for part in report["parts"]:
        counts.setdefault(part["status"], []).append(part["name"])
    good = len(counts.pop("ok", []))
    others = "".join(f", {status}: {' and '.join(names)}" for status, names in counts.items())
    what = "one on the CPU, which tries the parts with tiny sizes" if report["device"] == "cpu" else "one on a GPU"
    state = "" if report["complete"] else " It is not complete: parts are still running, or it was stopped."
    return f"kumi {report['kumi']}, {what}: {good} parts ok{others}, in {report['seconds']:.0f} s.{state}"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table with a column for each key of `rows`."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = ["| " + " | ".join(map(_cell, names)) + " |", "|" + "---|" * len(names)]
    return head + ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]


def _cell(value: Any) -> str:
    """Return `value` as the text of a cell: figures with four digits, other text without what Markdown would read."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
