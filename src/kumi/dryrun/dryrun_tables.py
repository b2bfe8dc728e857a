"""The result of a dry run as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kumi.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def dry_run_tables(result: dict[str, Any]) -> RenderableType:
    """Return the tables of a result of `kumi.dryrun.dry_run`."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for rank in result["ranks"]:
        parts += [Text(_title(result, rank), style="bold"), _memory(rank["memory"]), Text()]
        parts += [Text(_verdict(rank["memory"])), Text(_flops(rank["flops"])), Text()]
        if rank["collectives"]:
            parts += [_messages(rank["collectives"]), Text()]
    cost = result["cost"]
    parts.append(
        Text(
            f"the dry run took {cost['cpu_seconds']:.1f} CPU seconds and {format_bytes(cost['host_memory'])} of memory"
        )
    )
    return Group(*parts)


def _title(result: dict[str, Any], rank: dict[str, Any]) -> str:
    """Return the title of a rank: its coordinates other than 0, and the microbatches of a step."""
    coordinates = ", ".join(f"{axis} {index}" for axis, index in rank["coordinates"].items() if index)
    count = rank["microbatches"]
    run = f", {count['carried_out']} of them run" if count["carried_out"] < count["step"] else ""
    place = f" ({coordinates})" if coordinates else ""
    return f"rank {rank['rank']} of {result['ranks_in_all']}{place}: a step of {count['step']} microbatches{run}"


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right")
    return table


def _memory(memory: dict[str, Any]) -> Table:
    """Return one row per kind of memory, and the total."""
    table = _table("memory at the peak", "dry run", "planner", "difference")
    for kind, sizes in memory["kinds"].items():
        if sizes["measured"] or sizes["planned"]:
            table.add_row(kind, format_bytes(sizes["measured"]), format_bytes(sizes["planned"]), "")
    table.add_row(
        "total", format_bytes(memory["measured"]), format_bytes(memory["planned"]), f"{memory['difference']:+.1%}"
    )
    return table


def _verdict(memory: dict[str, Any]) -> str:
    """Return whether the measured peak and the reserved memory fit on the device."""
    need = memory["measured"] + memory["reserved"]
    fits = "fits" if memory["fits"] else "does not fit"
    return (
        f"with the planner's {format_bytes(memory['reserved'])} for context and allocator, "
        f"{format_bytes(need)} of {format_bytes(memory['usable'])} usable: it {fits}"
    )


def _flops(flops: dict[str, float]) -> str:
    """Return the measured FLOPs beside those of the model, which are without recomputation."""
    model, measured = flops["model"], flops["measured"]
    unit, size = ("TFLOP", 1e12) if model >= 1e12 else ("GFLOP", 1e9)
    rest = "; the rest is recomputation" if measured > 1.0005 * model else ""
    return (
        f"{measured / size:,.1f} {unit} per step, {measured / model:.3f} times the {model / size:,.1f} of the "
        f"model{rest}"
    )


def _messages(rows: list[dict[str, Any]]) -> Table:
    """Return one row per kind, axis and size of messages, sent and planned."""
    table = _table("message", "over", "bytes", "dry run", "planner", "")
    for row in rows:
        size = format_bytes(row["bytes"]) if row["bytes"] else "various"
        counts = [f"{row[name]:,}" for name in ("sent", "listed")]
        if not row["bytes"]:
            counts = [f"{row[name]:,} ({format_bytes(row[f'{name}_bytes'])})" for name in ("sent", "listed")]
        table.add_row(row["kind"], row["axis"], size, *counts, "" if row["agrees"] else "differs")
    return table
