"""Small jobs that are planned in milliseconds: a tiny model on nodes of four devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from kumi.spec.batch import BatchSpec
from kumi.spec.checks import illegal
from kumi.spec.cluster import ClusterSpec, Device, Host, Link
from kumi.spec.divisibility import divisors
from kumi.spec.engine import KUMI, Engine
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.schedule import stage_assignment
from kumi.spec.schedules import SCHEDULES
from kumi.spec.sharding import stage_bounds

GPU = Device(
    "GPU", "cuda", 1 << 34, ("float32", "bfloat16"), (("bfloat16", 2e14), ("float32", 2e13)), 1.5e12, processors=100
)
# Computes and launches kernels in no time, so that all communication is exposed.
INSTANT = replace(GPU, peak=(("bfloat16", 1e24),), memory_bandwidth=0.0, launch=0.0)
LINKS = (Link("inside", 4, 300e9, 3e-6), Link("network", 1 << 30, 25e9, 10e-6))
NO_HOST = Host()
# Share of a device that plans of these jobs leave free, so that the tests know which layouts fit.
MARGIN = 0.02
# Has room and bandwidth for offloading, NVMe included.
HOST = Host(1 << 38, 25e9, 2e9, 1 << 40)


def model(
    layers: int = 4, experts: int = 0, vocab: int = 4000, tied: bool = False, dense: int = 0, hidden: int = 256
) -> ModelSpec:
    """Return a decoder of `layers` layers; with `experts`, all layers but the first `dense` have them."""
    attention = Attention(4, 2, hidden // 4, Rope(10000.0))
    plain = LayerSpec(attention, MLP(11 * hidden // 4))
    sparse = LayerSpec(attention, MoE(experts, 2, hidden // 2)) if experts else plain
    return ModelSpec(
        "llama", vocab, hidden, (plain,) * dense + (sparse,) * (layers - dense), 1e-5, 8192, tie_word_embeddings=tied
    )


def job(
    nodes: int = 2,
    *,
    of: ModelSpec | None = None,
    sequences: int = 16,
    seq_len: int = 1024,
    kind: str = "bf16",
    engine: Engine = KUMI,
    device: Device = GPU,
    memory: float | None = None,
    host: Host = NO_HOST,
    links: tuple[Link, ...] = LINKS,
) -> Job:
    """Return a job of `sequences` sequences per step on `nodes` nodes of four devices with `memory` bytes each."""
    device = device if memory is None else replace(device, memory=int(memory))
    cluster = ClusterSpec("test", device, 4, nodes, links=links if nodes > 1 else links[:1], host=host)
    return Job(
        of or model(),
        cluster,
        BatchSpec(seq_len, seq_len * sequences),
        PRECISIONS[kind],
        Optim(),
        engine,
        margin=MARGIN,
    )


def every_layout(job: Job, **pinned: Any) -> Iterator[Layout]:
    """Yield all legal layouts of `job` with a dense model and no offloading that agree with `pinned`.

    The oracle for a search: layouts are built one by one and checked with `problems`; ZeRO needs data-parallel ranks.

    Tensor parallelism implies sequence parallelism, as in a search.
    """
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    for degrees in product(divisors(job.cluster.devices), repeat=len(axes)):
        mesh = dict(zip(axes, degrees, strict=True))
        if Layout(**mesh).world_size == job.cluster.devices:
            for plain in _inner(job, mesh):
                yield from (layout for layout in recomputed(job, plain) if agrees(layout, pinned))


def _inner(job: Job, mesh: dict[str, int]) -> Iterator[Layout]:
    stages = range(1, job.model.num_hidden_layers + 3) if mesh["pp"] > 1 else (1,)
    schedules = SCHEDULES if mesh["pp"] > 1 else ("1f1b",)
    for zero, size, schedule, count in product(range(4), divisors(job.batch.sequences), schedules, stages):
        layout = Layout(**mesh, zero=zero, microbatch=size, schedule=schedule, stages=count)
        divides = zero == 0 or layout.dp_shard * layout.cp > 1
        if divides and not illegal(job.model, layout, job.cluster, job.batch):
            yield layout


def recomputed(job: Job, layout: Layout) -> Iterator[Layout]:
    """Yield `layout` without recomputation, and with every kind and number of recomputed layers."""
    yield layout
    bounds = stage_bounds(layout, job.model.num_hidden_layers)
    stages_of_rank = stage_assignment(layout.schedule, layout.pp, layout.stages)
    most = max(sum(bounds[stage][1] - bounds[stage][0] for stage in stages) for stages in stages_of_rank)
    for how in ("selective", "full"):
        yield from (replace(layout, recompute=how, recompute_layers=count) for count in range(1, max(1, most) + 1))


def agrees(layout: Layout, pinned: dict[str, Any]) -> bool:
    """Return True if the fields of `layout` have the pinned values."""
    return all(getattr(layout, name) == value for name, value in pinned.items())
