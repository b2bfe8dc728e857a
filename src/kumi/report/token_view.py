"""Sequences of prepared data in the terminal: trained tokens in colour, or in [[ ]] where there is no colour.

A unit is a document or an example of a source. It has one sequence, or several, such as the two of a pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kumi.report.palette import GREEN, ORANGE
from kumi.safe_output import visible

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


def render_units(units: list[dict[str, Any]], *, colour: bool) -> RenderableType:
    """Return the content of `kumi data show`: for each unit its origin and counts, then its messages, then the
    lines in which the template's own text differs and the further fields, where the unit has them.

    units: plain data of `kumi.data.shown.show_units`.
    colour: trained text is green and bold, other control tokens are orange. Without colour, trained text is in [[ ]].
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for unit in units:
        for sequence in unit["sequences"]:
            parts.append(Text(_heading(unit, sequence), style="bold"))
            table = Table.grid(padding=(0, 2))
            table.add_column(justify="right", style="dim", no_wrap=True)
            table.add_column(overflow="fold")
            for message in sequence["messages"]:
                table.add_row(message["role"], _message(message, colour))
            parts += [table, Text()]
        if "stock" in unit:
            parts += [_difference(unit, colour), Text()]
        parts += [Text(f"{key}: {visible(str(value))}") for key, value in unit.get("extra", {}).items()]
    return Group(*parts)


def _heading(unit: dict[str, Any], sequence: dict[str, Any]) -> str:
    """Return the line above a sequence: where it comes from, where it is trained, how much of it."""
    share = sequence["trained"] / sequence["tokens"] if sequence["tokens"] else 0.0
    words = [f"{unit['source']}, {unit['side']}, {'document' if unit['kind'] == 'text' else 'unit'} {unit['unit']}"]
    if sequence["name"]:
        words.append(sequence["name"])
    if unit.get("label") is not None:
        words.append("desirable" if unit["label"] else "not desirable")
    if unit.get("bin") is not None:
        words.append(f"bin {unit['bin']}, row {unit['row']} of the first epoch")
    words.append(f"{sequence['tokens']} tokens, {sequence['trained']} trained ({share:.0%})")
    return " | ".join(words)


def _message(message: dict[str, Any], colour: bool) -> Text:
    """Return the text of a message; its runs are pieces that are trained as a whole or not at all."""
    from rich.text import Text

    text, opened = Text(), False
    for run in message["runs"]:
        if not colour and run["trained"] != opened:
            text.append("[[" if run["trained"] else "]]")
            opened = run["trained"]
        words = visible(run["text"]) + (f" (weight {run['weight']:g})" if "weight" in run else "")
        text.append(words, style=_style(run) if colour else "")
    if opened:
        text.append("]]")
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def _difference(unit: dict[str, Any], colour: bool) -> Text:
    """Return the lines in which the template's text of the whole conversation differs from the sequences."""
    from difflib import unified_diff

    from rich.text import Text

    text = Text()
    for position, sequence in enumerate(unit["sequences"]):
        if position >= len(unit["stock"]):
            text.append("the row is not in the files any more\n")
            continue
        rendered = "".join(run["text"] for message in sequence["messages"] for run in message["runs"])
        stock, ours = (visible(words).splitlines() for words in (unit["stock"][position], rendered))
        lines = list(unified_diff(stock, ours, "whole conversation by the template", "as trained", n=1, lineterm=""))
        for line in lines or ["the same text as the template's over the whole conversation"]:
            style = {"+": GREEN, "-": ORANGE}.get(line[:1], "") if colour else ""
            text.append(line + "\n", style=style)
    text.rstrip()
    return text


def _style(run: dict[str, Any]) -> str:
    """Return the style of a run: trained ones are green and bold, and the stop token is underlined, too."""
    if run["trained"]:
        return f"bold underline {GREEN}" if run.get("stop") else f"bold {GREEN}"
    return ORANGE if run["control"] else "dim"
