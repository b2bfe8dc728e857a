"""From measurements to the description of a machine that the planner reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import harmonic_mean
from typing import Any

from kumi.bench.file import digits
from kumi.bench.fit import fit_link
from kumi.bench.found import Found, Timing, rate
from kumi.config.cluster_file import NodeFile
from kumi.config.jobs import choose_precision
from kumi.report.words import plural
from kumi.spec.cluster import Device
from kumi.units import write_bandwidth, write_bytes, write_duration, write_flops

# Element-wise kinds that tell the share of the bandwidth, each counted alike. Some of CUDA's are fused, and move less
# than is counted.
STREAMED = {"cpu": ("add", "gate", "norm", "rope", "logits"), "cuda": ("add", "gate")}


def node_of(found: Found, base: Device, ranks: int) -> NodeFile:
    """A node of `ranks` devices like `base` with the figures that were measured of them.

    What `base` has from a data sheet (memory, and on a GPU that kumi knows its peak and bandwidth) stays; shares are
    of that.
    """
    device = _device(found, base, ranks)
    links = [_link(found, base.kind, ranks)] if ranks > 1 else []
    return NodeFile.model_validate({"device": device, "devices_per_node": ranks, "links": links})


def peaks(found: Found, base: Device) -> dict[str, float]:
    """FLOP/s by dtype: the data sheet's where it is known of a GPU, the best product's or layer's otherwise."""
    best: dict[str, float] = {}
    for one in (*found.of("product"), *found.of("linear")):
        best[one.dtype] = max(one.rate, best.get(one.dtype, 0.0))
    return best | (dict(base.peak) if base.kind == "cuda" else {})


def matmul_share(found: Found, dtype: str, peak: float) -> float:
    """The share of `peak` that products reach: on a GPU in large squares, from which the planner derives the others by
    their tiles; on a CPU in linear layers as they train, each counted alike."""
    if not found.processors:
        return min(1.0, harmonic_mean([one.rate for one in found.of("linear", dtype)]) / peak)
    products = found.of("product", dtype)
    most = max(one.amount for one in products)
    return min(1.0, rate([one for one in products if one.amount == most]) / peak)


def main_dtype(base: Device) -> str:
    """The dtype that training computes in here by default."""
    return choose_precision("auto", base).compute


def bandwidth(found: Found, base: Device) -> float:
    """Bytes/s of the memory: the data sheet's of a GPU, otherwise the best that long sweeps reach."""
    known = base.memory_bandwidth if base.kind == "cuda" else 0.0
    return known or max(one.rate for one in (*found.of("copy"), *found.of("update")))


def _device(found: Found, base: Device, ranks: int) -> dict[str, Any]:
    peak, dtype, memory = peaks(found, base), main_dtype(base), bandwidth(found, base)
    shares = {name: digits(matmul_share(found, name, peak[name])) for name in peak if found.of("product", name)}
    streamed = [one.rate for one in found.of("element-wise", dtype) if one.what.split()[0] in STREAMED[base.kind]]
    attention = _attention(found, dtype, peak[dtype])
    (launch,) = found.of("launch")
    described = {
        "name": base.name,
        "kind": base.kind,
        "memory": write_bytes(base.memory),
        "dtypes": list(base.dtypes),
        "peak_flops": {name: write_flops(digits(flops)) for name, flops in peak.items()},
        "memory_bandwidth": write_bandwidth(digits(memory)),
        "stream": min(1.0, digits(harmonic_mean(streamed) / memory)),
        "matmul": shares,
        "launch": write_duration(digits(launch.seconds)),
        "reserved": write_bytes(found.reserved),
        "sources": _sources(base, dtype, ranks),
    }
    return described | _if_known(attention=attention, processors=found.processors, watts=base.watts)


def _attention(found: Found, dtype: str, peak: float) -> dict[str, float]:
    """The shares of `peak` that attention reaches, every shape counted alike; nothing where it was not measured."""
    rates = {
        way: [one.rate for one in found.of("attention", dtype) if one.what.startswith(way)]
        for way in ("forward", "backward")
    }
    return {way: min(1.0, digits(harmonic_mean(each) / peak)) for way, each in rates.items() if each}


def _if_known(**figures: Any) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value}


def _sources(base: Device, dtype: str, ranks: int) -> dict[str, str]:
    together = "all ranks at once" if ranks > 1 else "one rank"
    sheet = base.kind == "cuda" and bool(base.peak)
    return {
        "peak_flops": f"data sheet of {base.name}" if sheet else f"kumi bench: the best matrix product, {together}",
        "memory_bandwidth": f"data sheet of {base.name}"
        if sheet and base.memory_bandwidth
        else f"kumi bench: the better of a copy and an AdamW update, {together}",
        "matmul, attention, stream, launch": f"kumi bench, {together}; attention and stream in {dtype}",
        "memory": "what the system says, divided among the ranks" if base.kind == "cpu" else "what the driver says",
        "reserved": "kumi bench: held by a rank before any tensor",
    }


def _link(found: Found, kind: str, ranks: int) -> dict[str, Any]:
    """One link over all ranks: nothing that was measured tells ranks of one machine apart."""
    backend = {"cpu": "gloo", "cuda": "NCCL"}[kind]
    link, error = fit_link(backend, ranks, kind, found.transfers)
    said = (
        f"kumi bench: least squares over {len(found.transfers)} timed collectives, {100 * error:.0f} % off on average"
    )
    return {
        "name": backend,
        "span": ranks,
        "bandwidth": write_bandwidth(digits(link.bandwidth)),
        "latency": write_duration(digits(link.latency)),
        "efficiency": 1.0,
        "sources": {"bandwidth, latency, efficiency": said},
    }


def remarks(found: Found, base: Device, ranks: int, load: float) -> list[str]:
    """Comments for the file: with what it was measured, and the products that the shares were taken from.

    `load` is how many processes wanted a core before any rank of ours did.
    """
    peak, threads = peaks(found, base), f"{plural(found.threads, 'thread')} a rank"
    return [
        f"Measured by kumi bench: {ranks} x {base.name}, {threads}, torch {found.torch}; load before {load:.1f}.",
        f"These figures are of {ranks} ranks that work at the same time: with another number of ranks a CPU has others."
        if base.kind == "cpu"
        else f"The link was measured among the {ranks} devices of this machine; nothing is said of other machines.",
        "",
        "Matrix products, TFLOP/s and share of the peak:",
        *(_remark(one, peak) for one in found.of("product")),
    ]


def _remark(one: Timing, peak: Mapping[str, float]) -> str:
    return f"  {one.dtype:9} {one.what:33} {one.rate / 1e12:9.4g}  {one.rate / peak[one.dtype]:5.1%}"


def sizes_of(found: Found) -> Sequence[tuple[str, int]]:
    """Every (kind, degree) of which collectives were timed."""
    return list(dict.fromkeys((one.kind, one.degree) for one in found.transfers))
