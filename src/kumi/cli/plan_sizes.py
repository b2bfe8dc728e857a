"""`kumi plan --tokens N --days D`: how many machines that takes."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from kumi.errors import OK
from kumi.progress import showing
from kumi.report.run_description import show
from kumi.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kumi.plan.search.candidates import Pins
    from kumi.plan.search.diagnose import UnsupportedFn
    from kumi.plan.search.sizing import ClusterSize
    from kumi.spec.job import Job


def print_sizes(arguments: Namespace, job: Job, pinned: Pins, unsupported: UnsupportedFn | None) -> int:
    """Print how many nodes train `--tokens` tokens in `--days` days. Returns the exit code."""
    from kumi.plan.search.select import trainable_pins, unsupported_by_kumi
    from kumi.plan.search.sizing import search_cluster_sizes

    if arguments.trainable:
        pinned, unsupported = trainable_pins(job, pinned), unsupported_by_kumi(pinned)
    with showing("trying numbers of nodes", 1.0):
        tried = search_cluster_sizes(job, pinned, arguments.tokens, arguments.days, unsupported)
    if arguments.json:
        arguments.write_json([_plain(size) for size in tried])
        return OK
    last = tried[-1]
    tokens = format_count(arguments.tokens)
    machines = f"{last.nodes} nodes, {last.devices} x {job.cluster.device.name}"
    print(f"{tokens} tokens in {arguments.days:g} days: {machines}")
    show(_table(tried))
    return OK


def _plain(one: ClusterSize) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in ("nodes", "devices", "days", "device_hours", "cost", "energy")}
    return fields | {"best": one.best.as_dict()}


def _table(found: Sequence[ClusterSize]) -> Any:
    """One row for each number of nodes that was tried."""
    from rich.table import Table

    from kumi.report.phrases import layout_words

    priced, powered = found[-1].cost is not None, found[-1].energy is not None
    names = ["nodes", "devices", "days", "device-hours", *["cost"] * priced, *["MWh"] * powered]
    table = Table(box=None, pad_edge=False)
    for name in (*names, "tokens/s", "MFU", "memory"):
        table.add_column(name, justify="right")
    table.add_column("layout")
    for one in found:
        money = [f"{one.cost:,.0f}"] if one.cost is not None else []
        energy = [f"{one.energy / 1000:,.1f}"] if one.energy is not None else []
        best = one.best
        figures = (format_count(best.tokens_per_second), f"{best.mfu:.1%}", format_bytes(best.peak_memory))
        counts = (f"{one.nodes}", f"{one.devices}", f"{one.days:,.1f}", f"{one.device_hours:,.0f}")
        table.add_row(*counts, *money, *energy, *figures, layout_words(best.layout))
    return table
