"""Turn measurements into the description of a machine for the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean
from typing import Any

from kumi.bench.cluster_toml import round_to_four_digits
from kumi.bench.fit_links import fit_link
from kumi.bench.measurements import Measurements, Timing, rate
from kumi.config.cluster_file import NodeFile
from kumi.config.jobs import choose_precision
from kumi.report.phrases import plural
from kumi.spec.cluster import Device
from kumi.spec.precision import ITEMSIZE
from kumi.units import write_bandwidth, write_bytes, write_duration, write_flops

# Element-wise kinds whose rates are averaged for `stream`, the fraction of the memory bandwidth that they reach. Other
# kinds are fused on CUDA and move fewer bytes than the planner counts.
STREAMED = {"cpu": ("add", "gate", "norm", "rope", "logits"), "cuda": ("add", "gate")}

# The passes of attention. The `what` of a timing begins with its pass.
_DIRECTIONS = ("forward", "backward")


def node_of(measured: Measurements, base: Device, ranks: int) -> NodeFile:
    """Return a node of `ranks` devices like `base`, with measured numbers.

    The size of the memory is that of `base`. The peak and the memory bandwidth of a GPU with a data sheet are those of
    `base` too, and measured fractions are relative to them.
    """
    device = _device(measured, base, ranks)
    links = [_link(measured, base.kind, ranks)] if ranks > 1 else []
    return NodeFile.model_validate({"device": device, "devices_per_node": ranks, "links": links})


def peaks(measured: Measurements, base: Device) -> dict[str, float]:
    """Return FLOP/s per dtype: a GPU's data sheet, otherwise the fastest measured product or linear layer."""
    best: dict[str, float] = {}
    for timing in (*measured.of("product"), *measured.of("linear")):
        best[timing.dtype] = max(timing.rate, best.get(timing.dtype, 0.0))
    return best | (dict(base.peak) if base.is_gpu else {})


def matmul_fraction(measured: Measurements, dtype: str, peak: float) -> float:
    """Return the fraction of `peak` that matmuls reach.

    On a GPU it is the fraction of the largest square products; the planner derives that of other shapes from their
    tiles. On a CPU it is the harmonic mean over linear layers, forward and backward.
    """
    if not measured.processors:
        return min(1.0, harmonic_mean([timing.rate for timing in measured.of("linear", dtype)]) / peak)
    products = measured.of("product", dtype)
    most = max(timing.amount for timing in products)
    return min(1.0, rate([timing for timing in products if timing.amount == most]) / peak)


def main_dtype(base: Device) -> str:
    """Return the dtype in which training computes on `base` by default."""
    return choose_precision("auto", base).compute


def bandwidth(measured: Measurements, base: Device) -> float:
    """Return the bytes/s of the memory: a GPU's data sheet, otherwise the faster of copy and AdamW update."""
    sheet = base.memory_bandwidth if base.is_gpu else 0.0
    return sheet or max(timing.rate for timing in (*measured.of("copy"), *measured.of("update")))


def _device(measured: Measurements, base: Device, ranks: int) -> dict[str, Any]:
    """Return the `device` table of the cluster file; quantities are texts with units."""
    peak, dtype, memory = peaks(measured, base), main_dtype(base), bandwidth(measured, base)
    shares = {
        name: round_to_four_digits(matmul_fraction(measured, name, peak[name]))
        for name in peak
        if measured.of("product", name)
    }
    streamed = [
        timing.rate for timing in measured.of("element-wise", dtype) if timing.what.split()[0] in STREAMED[base.kind]
    ]
    attention = _attention(measured, dtype, peak[dtype])
    (launch,) = measured.of("launch")
    fields = {
        "name": base.name,
        "kind": base.kind,
        "memory": write_bytes(base.memory),
        "dtypes": list(base.dtypes),
        "peak_flops": {name: write_flops(round_to_four_digits(flops)) for name, flops in peak.items()},
        "memory_bandwidth": write_bandwidth(round_to_four_digits(memory)),
        "stream": min(1.0, round_to_four_digits(harmonic_mean(streamed) / memory)),
        "read": {
            timing.dtype: _read_share(measured, timing, memory, peak[timing.dtype] * shares[timing.dtype])
            for timing in measured.of("read")
        },
        "matmul": shares,
        "launch": write_duration(round_to_four_digits(launch.seconds)),
        "reserved": write_bytes(measured.reserved),
        "sources": _sources(base, dtype, ranks),
    }
    return fields | _nonzero(attention=attention, processors=measured.processors, watts=base.watts)


def _read_share(measured: Measurements, timing: Timing, memory: float, flops_per_second: float) -> float:
    """Return the share of the bandwidth `memory` at which the products of `timing` read their weights.

    A GPU computes while it reads. A CPU does both in turn, so the time of the FLOPs at full speed is subtracted, but at
    most half of the measured time.
    """
    seconds = timing.seconds
    if not measured.processors:
        flops = 2.0 * timing.rows * timing.amount / ITEMSIZE[timing.dtype]
        seconds = max(seconds / 2, seconds - flops / flops_per_second)
    return min(1.0, round_to_four_digits(timing.amount / seconds / memory))


def _attention(measured: Measurements, dtype: str, peak: float) -> dict[str, Any]:
    """Return the fractions of `peak` that attention reaches forward and backward in the longest documents, and its
    speed in documents of each measured length relative to these.

    The result is empty if attention was not measured.
    """
    shares: dict[int, dict[str, float]] = {}
    for timing in measured.of("attention", dtype):
        shares.setdefault(timing.tokens, {})[timing.what.split()[0]] = min(1.0, timing.rate / peak)
    complete = {tokens: each for tokens, each in sorted(shares.items()) if len(each) == len(_DIRECTIONS)}
    if not complete:
        return {}
    *_, longest = complete.values()
    table: dict[str, Any] = {name: round_to_four_digits(longest[name]) for name in _DIRECTIONS}
    if len(complete) > 1:
        table["by_length"] = [
            {"tokens": tokens, **{name: round_to_four_digits(each[name] / longest[name]) for name in _DIRECTIONS}}
            for tokens, each in complete.items()
        ]
    return table


def _nonzero(**figures: Any) -> dict[str, Any]:
    """Return the figures that are not 0, empty or None."""
    return {name: value for name, value in figures.items() if value}


def _sources(base: Device, dtype: str, ranks: int) -> dict[str, str]:
    """Return the provenance of every figure, for the cluster file."""
    ranks_text = "all ranks at once" if ranks > 1 else "one rank"
    sheet = base.is_gpu and bool(base.peak)
    return {
        "peak_flops": f"data sheet of {base.name}"
        if sheet
        else f"kumi bench: the fastest matrix product, {ranks_text}",
        "memory_bandwidth": f"data sheet of {base.name}"
        if sheet and base.memory_bandwidth
        else f"kumi bench: the faster of a copy and an AdamW update, {ranks_text}",
        "matmul, read, attention, stream, launch": f"kumi bench, {ranks_text}; attention and stream in {dtype}",
        "memory": "the operating system, divided among the ranks" if base.kind == "cpu" else "the driver",
        "reserved": "kumi bench: memory of a rank before it allocates tensors",
    }


def _link(measured: Measurements, kind: str, ranks: int) -> dict[str, Any]:
    """Return one link over all ranks: the measurements do not distinguish pairs of ranks on a machine."""
    backend = {"cpu": "gloo", "cuda": "NCCL"}[kind]
    link, error = fit_link(backend, ranks, kind, measured.transfers)
    provenance = (
        f"kumi bench: least squares over {len(measured.transfers)} timed collectives, mean error {100 * error:.0f} %"
    )
    return {
        "name": backend,
        "span": ranks,
        "bandwidth": write_bandwidth(round_to_four_digits(link.bandwidth)),
        "latency": write_duration(round_to_four_digits(link.latency)),
        "efficiency": 1.0,
        "sources": {"bandwidth, latency, efficiency": provenance},
    }


def remarks(measured: Measurements, base: Device, ranks: int, load: float) -> list[str]:
    """Return comments for the cluster file: how the machine was measured, and the speed of each matrix product.

    `load` is the system's load average before the ranks started.
    """
    peak, threads = peaks(measured, base), f"{plural(measured.threads, 'thread')} per rank"
    return [
        f"Measured by kumi bench: {ranks} x {base.name}, {threads}, torch {measured.torch}; load before {load:.1f}.",
        f"The figures hold for {ranks} ranks that share this CPU; measure again for another number of ranks."
        if base.kind == "cpu"
        else f"The link was measured among the {ranks} devices of this machine, not between machines.",
        "",
        "Matrix products, TFLOP/s and share of the peak:",
        *(_remark(timing, peak) for timing in measured.of("product")),
    ]


def _remark(timing: Timing, peak: Mapping[str, float]) -> str:
    return f"  {timing.dtype:9} {timing.what:33} {timing.rate / 1e12:9.4g}  {timing.rate / peak[timing.dtype]:5.1%}"


def sizes_of(measured: Measurements) -> Sequence[tuple[str, int]]:
    """Return every (kind, degree) with timed collectives."""
    return list(dict.fromkeys((transfer.kind, transfer.degree) for transfer in measured.transfers))
