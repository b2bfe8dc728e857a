"""The layout of a run: what the user pinned, and the least communication that fits for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kumi.errors import FitError, LayoutError
from kumi.plan.memory import estimate_memory
from kumi.plan.types import MemoryEstimate
from kumi.spec.batch import BatchSpec
from kumi.spec.checks import divisors, problems, untrained
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.optim import Optim
from kumi.spec.precision import Precision
from kumi.units import format_bytes

# Past this many tokens a microbatch no longer makes matrix products faster, it only takes memory.
MICROBATCH_TOKENS = 8192
# Share of the device that the estimate may fill: allocators round up, and libraries keep buffers of their own.
USABLE = 0.9


def choose_layout(
    model: ModelSpec,
    cluster: ClusterSpec,
    batch: BatchSpec,
    precision: Precision,
    optim: Optim,
    pinned: dict[str, int | str],
) -> tuple[Layout, MemoryEstimate]:
    """The first layout, from the least communication and recomputation to the most, that is legal and fits.

    Raises LayoutError with the reasons when what is pinned allows no legal layout, and FitError when none fits.
    """
    reasons = untrained(Job(model, cluster, batch, precision, optim), Layout(**pinned))  # type: ignore[arg-type]
    if reasons:
        raise LayoutError("; ".join(reasons))
    smallest: tuple[Layout, MemoryEstimate] | None = None
    for layout in candidates(cluster, batch, pinned):
        found = problems(model, layout, cluster, batch)
        if found:
            reasons = reasons or found
            continue
        estimate = estimate_memory(model, layout, batch, precision, optim, cluster.device.kind)
        if estimate.total <= USABLE * cluster.device.memory:
            return layout, estimate
        if smallest is None or estimate.total < smallest[1].total:
            smallest = layout, estimate
    if smallest is None:
        raise LayoutError("; ".join(reasons))
    raise FitError(_does_not_fit(*smallest, cluster))


def candidates(cluster: ClusterSpec, batch: BatchSpec, pinned: dict[str, int | str]) -> Iterator[Layout]:
    """Layouts over the data axes that agree with `pinned`, in order of preference."""
    for base in _data_axes(cluster, pinned):
        for recompute in [pinned["recompute"]] if "recompute" in pinned else ["none", "selective", "full"]:
            for microbatch in _microbatches(base, batch, pinned):
                yield replace(base, recompute=str(recompute), microbatch=microbatch)


def _data_axes(cluster: ClusterSpec, pinned: dict[str, int | str]) -> Iterator[Layout]:
    """Layouts without microbatch and recompute: plain data parallelism first, then ZeRO-1, 2, 3."""
    pp, cp, tp, ep = (int(pinned.get(axis, 1)) for axis in ("pp", "cp", "tp", "ep"))
    fixed = Layout(pp=pp, cp=cp, tp=tp, ep=ep)
    ranks = max(1, cluster.devices // fixed.world_size)
    for zero in [int(pinned["zero"])] if "zero" in pinned else [0, 1, 2, 3]:
        whole = (ranks, 1) if zero == 0 else (1, ranks)
        replicate, shard = pinned.get("dp_replicate"), pinned.get("dp_shard")
        if replicate is not None or shard is not None:
            whole = (
                int(replicate or max(1, ranks // int(shard or 1))),
                int(shard or max(1, ranks // int(replicate or 1))),
            )
        yield replace(fixed, dp_replicate=whole[0], dp_shard=whole[1], zero=zero)


def _microbatches(layout: Layout, batch: BatchSpec, pinned: dict[str, int | str]) -> list[int]:
    if "microbatch" in pinned:
        return [int(pinned["microbatch"])]
    share = max(1, batch.sequences // layout.dp)
    return [size for size in reversed(divisors(share)) if size == 1 or size * batch.seq_len <= MICROBATCH_TOKENS]


def _does_not_fit(layout: Layout, estimate: MemoryEstimate, cluster: ClusterSpec) -> str:
    device = cluster.device
    need, have = format_bytes(estimate.total), format_bytes(USABLE * device.memory)
    states = format_bytes(estimate.params + estimate.grads + estimate.optimizer)
    return (
        f"the model does not fit: even zero={layout.zero}, microbatch={layout.microbatch}, "
        f"recompute={layout.recompute} needs {need} a rank ({states} of it states), and {device.name} has {have} "
        f"usable; use more devices or a shorter seq_len"
    )
