"""What was measured, as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kumi.bench.fit import line
from kumi.bench.found import Found
from kumi.bench.machine import sizes_of
from kumi.config.cluster_file import NodeFile
from kumi.report.words import plural
from kumi.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def render(found: Found, node: NodeFile) -> RenderableType:
    """Products, other kernels and collectives, each with what the cluster file makes of them."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_summary(found, node), Text(), _products(found, node), Text(), _kernels(found)]
    if found.transfers:
        parts += [Text(), _collectives(found)]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right")
    return table


def _summary(found: Found, node: NodeFile) -> Table:
    from rich.table import Table

    device = node.device
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    peak = ", ".join(f"{dtype} {flops / 1e12:.4g} TFLOP/s" for dtype, flops in device.peak_flops.items())
    threads = plural(found.threads, "thread")
    table.add_row("machine", f"{node.devices_per_node} x {device.name}, {threads} a rank, torch {found.torch}")
    if found.numerics:
        table.add_row("numerics", found.numerics)
    table.add_row("peak", peak)
    table.add_row("products", ", ".join(f"{dtype} {share:.1%}" for dtype, share in (device.matmul or {}).items()))
    if device.attention:
        ways = device.attention
        table.add_row("attention", f"{ways.forward:.1%} of the peak forward, {ways.backward:.1%} backward")
    if device.stream and device.memory_bandwidth and device.launch:
        table.add_row(
            "memory",
            f"{device.memory_bandwidth / 1e9:.4g} GB/s, of which element-wise work reaches {device.stream:.1%}",
        )
        table.add_row("launch", f"{device.launch * 1e6:.3g} us from one operation to the next")
    for link in node.links:
        table.add_row("link", f"{link.name}: {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us a hop")
    return table


def _products(found: Found, node: NodeFile) -> Table:
    """One row a shape, one column a dtype."""
    dtypes = list(dict.fromkeys(one.dtype for one in found.of("product")))
    table = _table(
        "matrix products (rows x columns x inner)", "shape", *(f"{dtype}: TFLOP/s, of peak" for dtype in dtypes)
    )
    timed = {(one.what, one.dtype): one.rate for one in found.of("product")}
    peak: dict[str, float] = dict(node.device.peak_flops.items())
    for what in dict.fromkeys(one.what for one in found.of("product")):
        rates = [(timed[what, dtype], peak[dtype]) for dtype in dtypes]
        table.add_row(what, *(f"{rate / 1e12:8.4g}  {rate / peak:6.1%}" for rate, peak in rates))
    return table


def _kernels(found: Found) -> Table:
    table = _table("other work", "what", "dtype", "each", "rate")
    for one in found.kernels:
        if one.kind != "product":
            unit, scale = ("TFLOP/s", 1e12) if one.kind in ("attention", "linear") else ("GB/s", 1e9)
            speed = "" if one.kind == "launch" else f"{one.rate / scale:.4g} {unit}"
            table.add_row(f"{one.kind}: {one.what}", one.dtype, f"{one.seconds * 1e6:,.1f} us", speed)
    return table


def _collectives(found: Found) -> Table:
    """One row for each kind and group: its own line through all sizes, and its largest size."""
    table = _table("collectives", "kind", "ranks", "no length", "bandwidth", "off by", "largest", "takes")
    for kind, degree in sizes_of(found):
        timed = [one for one in found.transfers if (one.kind, one.degree) == (kind, degree)]
        fitted, last = line([one.size for one in timed], [one.seconds for one in timed]), timed[-1]
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
