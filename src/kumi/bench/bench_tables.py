"""Measurements as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kumi.bench.describe_machine import sizes_of
from kumi.bench.fit_links import fit_line
from kumi.bench.measurements import Measurements
from kumi.config.cluster_file import NodeFile
from kumi.report.phrases import plural
from kumi.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def render_measurements(measured: Measurements, node: NodeFile) -> RenderableType:
    """Return tables of the resulting cluster file, of matrix products, other kernels and collectives."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [
        _summary(measured, node),
        Text(),
        _products(measured, node),
        Text(),
        _kernels(measured),
    ]
    if measured.transfers:
        parts += [Text(), _collectives(measured)]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


def _summary(measured: Measurements, node: NodeFile) -> Table:
    """Return the machine and the figures of its cluster file, one per row."""
    from rich.table import Table

    device = node.device
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    peak = ", ".join(f"{dtype} {flops / 1e12:.4g} TFLOP/s" for dtype, flops in device.peak_flops.items())
    threads = plural(measured.threads, "thread")
    table.add_row("machine", f"{node.devices_per_node} x {device.name}, {threads} per rank, torch {measured.torch}")
    if measured.numerics:
        table.add_row("numerics", measured.numerics)
    table.add_row("peak", peak)
    table.add_row("products", ", ".join(f"{dtype} {fraction:.1%}" for dtype, fraction in (device.matmul or {}).items()))
    if device.attention:
        attention = device.attention
        table.add_row("attention", f"{attention.forward:.1%} of the peak forward, {attention.backward:.1%} backward")
        if attention.by_length:
            speeds = (f"{item.tokens:,} {item.forward:.0%} and {item.backward:.0%}" for item in attention.by_length)
            table.add_row("", f"relative to these, by tokens of a document: {', '.join(speeds)}")
    if device.stream and device.memory_bandwidth and device.launch:
        table.add_row(
            "memory", f"{device.memory_bandwidth / 1e9:.4g} GB/s, element-wise operations reach {device.stream:.1%}"
        )
        reads = ", ".join(f"{dtype} {share:.1%}" for dtype, share in (device.read or {}).items())
        table.add_row("", f"products of few rows read their weights at {reads} of this bandwidth")
        table.add_row("launch", f"{device.launch * 1e6:.3g} us per operation")
    for link in node.links:
        table.add_row("link", f"{link.name}: {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us per hop")
    return table


def _products(measured: Measurements, node: NodeFile) -> Table:
    """Return one row per form and shape of a product, and one column per dtype."""
    dtypes = list(dict.fromkeys(timing.dtype for timing in measured.of("product")))
    table = _table(
        "matrix products (rows x columns x inner)", "shape", *(f"{dtype}: TFLOP/s, of peak" for dtype in dtypes)
    )
    timed = {(timing.what, timing.dtype): timing.rate for timing in measured.of("product")}
    peak: dict[str, float] = dict(node.device.peak_flops.items())
    for what in dict.fromkeys(timing.what for timing in measured.of("product")):
        rates = [(timed[what, dtype], peak[dtype]) for dtype in dtypes]
        table.add_row(what, *(f"{rate / 1e12:8.4g}  {rate / peak:6.1%}" for rate, peak in rates))
    return table


def _kernels(measured: Measurements) -> Table:
    """Return one row per timed kernel that is not a matrix product."""
    table = _table("other kernels", "kernel", "dtype", "time", "rate")
    for timing in measured.kernels:
        if timing.kind != "product":
            unit, scale = ("TFLOP/s", 1e12) if timing.kind in ("attention", "linear") else ("GB/s", 1e9)
            speed = "" if timing.kind == "launch" else f"{timing.rate / scale:.4g} {unit}"
            table.add_row(f"{timing.kind}: {timing.what}", timing.dtype, f"{timing.seconds * 1e6:,.1f} us", speed)
    return table


def _collectives(measured: Measurements) -> Table:
    """Return one row per kind and group size: the line fitted to all sizes, its error, and the largest size's time."""
    table = _table("collectives", "kind", "ranks", "latency", "bandwidth", "error", "largest", "time")
    for kind, degree in sizes_of(measured):
        timed = [transfer for transfer in measured.transfers if (transfer.kind, transfer.degree) == (kind, degree)]
        fitted, last = fit_line([item.size for item in timed], [item.seconds for item in timed]), timed[-1]
        table.add_row(
            kind,
            str(degree),
            f"{fitted.latency * 1e6:,.0f} us",
            f"{fitted.bandwidth / 1e9:.3g} GB/s",
            f"{fitted.error:.0%}",
            format_bytes(last.size),
            f"{last.seconds * 1e3:.3g} ms",
        )
    return table
