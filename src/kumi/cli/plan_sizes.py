"""`kumi plan --tokens N --days D`: the number of nodes that trains N tokens in D days."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from kumi.errors import OK
from kumi.progress import show_progress
from kumi.report.run_description import print_content
from kumi.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kumi.plan.search.candidates import Pins
    from kumi.plan.search.diagnose import UnsupportedFn
    from kumi.plan.search.sizing import ClusterSize
    from kumi.spec.job import Job


def print_sizes(arguments: Namespace, job: Job, pinned: Pins, unsupported: UnsupportedFn | None) -> int:
    """Print the number of nodes that trains `--tokens` tokens in `--days` days. Return the exit code."""
    from kumi.plan.search.select import trainable_pins, unsupported_by_kumi
    from kumi.plan.search.sizing import search_cluster_sizes

    if arguments.trainable:
        pinned, unsupported = trainable_pins(job, pinned), unsupported_by_kumi(pinned)
    with show_progress("searching layouts", 1.0, "{:.0%}".format, enabled=not arguments.json) as update:
        tried = search_cluster_sizes(job, pinned, arguments.tokens, arguments.days, unsupported, update)
    if arguments.json:
        arguments.write_json([_plain(size) for size in tried])
        return OK
    last = tried[-1]
    tokens = format_count(arguments.tokens)
    machines = f"{last.nodes} nodes, {last.devices} x {job.cluster.device.name}"
    print(f"{tokens} tokens in {arguments.days:g} days: {machines}")
    print_content(_table(tried))
    return OK


def _plain(size: ClusterSize) -> dict[str, Any]:
    fields = {name: getattr(size, name) for name in ("nodes", "devices", "days", "device_hours", "cost", "energy")}
    return fields | {"best": size.best.as_dict()}


def _table(tried: Sequence[ClusterSize]) -> Any:
    """Return one row per number of nodes."""
    from rich.table import Table

    from kumi.report.phrases import layout_words

    priced, powered = tried[-1].cost is not None, tried[-1].energy is not None
    names = ["nodes", "devices", "days", "device-hours", *["cost"] * priced, *["MWh"] * powered]
    table = Table(box=None, pad_edge=False)
    for name in (*names, "tokens/s", "MFU", "memory"):
        table.add_column(name, justify="right")
    table.add_column("layout")
    for size in tried:
        money = [f"{size.cost:,.0f}"] if size.cost is not None else []
        energy = [f"{size.energy / 1000:,.1f}"] if size.energy is not None else []
        best = size.best
        figures = (format_count(best.tokens_per_second), f"{best.mfu:.1%}", format_bytes(best.peak_memory))
        counts = (f"{size.nodes}", f"{size.devices}", f"{size.days:,.1f}", f"{size.device_hours:,.0f}")
        table.add_row(*counts, *money, *energy, *figures, layout_words(best.layout))
    return table
