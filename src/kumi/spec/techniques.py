"""Which memory techniques this version's trainer has, and where: what it refuses, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, ModelSpec, MoE
from kumi.spec.op import Op
from kumi.spec.sharding import zero_degree

# Elements of a bucket that the host updates at a time: long enough for a link's and a drive's full speed, small beside
# a model. And rooms that it has for buckets: for one that comes, one that is updated and one that goes.
BUCKET, ROOMS = 8 * 2**20, 3

# What tiles are trained with.
_WITH_TILES = {
    "tp": (1,),
    "schedule": ("1f1b", "gpipe", "interleaved"),
    "recompute": ("none", "full"),
    "offload": ("none", "optimizer", "optimizer-nvme", "activations"),
}

# The optimizers whose states may lie on the host and on its drives.
_OFFLOADED_OPTIMIZERS = ("adamw",)

# What products in float8 are trained with: all else multiplies elsewhere than in its layers.
_WITH_FLOAT8 = {"tp": (1,), "schedule": ("1f1b", "gpipe", "interleaved"), "tiles": (1,)}


def is_tiled(model: ModelSpec, op: Op) -> bool:
    """Whether `op` belongs to a dense feed-forward layer, shared experts left out: what `layout.tiles` cuts."""
    inside = op.name.rpartition(".")[0].endswith(".mlp")
    return inside and not op.experts and "ffn" in (op.source.name, op.target.name)


def untrained_techniques(model: ModelSpec, layout: Layout) -> Iterator[str]:
    """Why this version cannot train `model` with what `layout` says of memory."""
    yield from _offload(model, layout)
    if layout.tiles > 1:
        yield from _tiles(model, layout)


def untrained_float8(job: Job, layout: Layout) -> Iterator[str]:
    """Why this version cannot multiply in float8 with `layout`, where `job` wants it."""
    if job.precision.products != "float8":
        return
    if job.cluster.device.kind != "cuda" or "float8" not in job.cluster.device.dtypes:
        yield (
            f"precision.kind='fp8': this version multiplies in float8 on CUDA devices that have it, which "
            f"{job.cluster.device.name or 'this one'} does not say of itself; plan it, or set "
            f"precision.kind = 'bf16'"
        )
    for name, allowed in _WITH_FLOAT8.items():
        if getattr(layout, name) not in allowed:
            words = " or ".join(repr(word) for word in allowed)
            yield (
                f"precision.kind='fp8' with {name}={getattr(layout, name)!r}: set {name} = {words}, or "
                f"precision.kind = 'bf16'"
            )
    tokens = layout.microbatch * job.batch.seq_len // layout.cp
    if tokens % 16:
        yield (
            f"precision.kind='fp8' with {tokens} tokens of a microbatch on a rank: products in float8 take "
            f"multiples of 16; change batch.seq_len or layout.microbatch"
        )


def untrained_optimizer(job: Job, layout: Layout) -> Iterator[str]:
    """Why this version cannot train `job` with its optimizer and `layout`."""
    if job.optim.kind not in _OFFLOADED_OPTIMIZERS and layout.offload not in ("none", "activations"):
        kinds = " or ".join(repr(kind) for kind in _OFFLOADED_OPTIMIZERS)
        yield (
            f"optim.kind='{job.optim.kind}' with offload='{layout.offload}': this version offloads the "
            f"states of {kinds} only; set offload = 'none' or 'activations', or optim.kind = {kinds}"
        )


def _offload(model: ModelSpec, layout: Layout) -> Iterator[str]:
    offload, ranks = layout.offload, layout.dp_shard * layout.cp
    instead = f"offload = '{offload.replace('states', 'optimizer')}'"
    if offload.startswith("states") and (layout.zero != 3 or ranks == 1):
        yield (
            f"offload='{offload}' with zero={layout.zero} over {ranks} ranks: this version keeps parameters on the "
            f"host where zero = 3 divides them over several; set this, or {instead}"
        )
    elif offload.startswith("states") and _has_experts(model) and _copies_of_experts(layout) == 1:
        yield (
            f"offload='{offload}' with ep={layout.ep} and expert_tp={layout.expert_tp}: this version keeps on the "
            f"device what no two ranks hold, as here all experts; use a smaller ep x expert_tp, or "
            f"{instead}"
        )
    if offload == "activations" and layout.recompute == "selective":
        yield (
            "offload='activations' with recompute='selective': this version moves what layers keep whole; "
            "set recompute = 'none' or 'full'"
        )


def _has_experts(model: ModelSpec) -> bool:
    return any(isinstance(layer.mlp, MoE) for layer in model.layers)


def _copies_of_experts(layout: Layout) -> int:
    return layout.dp_replicate * zero_degree(layout, routed=True)


def _tiles(model: ModelSpec, layout: Layout) -> Iterator[str]:
    widths = sorted({layer.mlp.intermediate_size for layer in model.layers if isinstance(layer.mlp, MLP)})
    if not widths:
        yield f"tiles={layout.tiles}, but the model has no dense feed-forward layers; set tiles = 1"
        return
    for name, allowed in _WITH_TILES.items():
        if getattr(layout, name) not in allowed:
            words = " or ".join(repr(word) for word in allowed)
            yield f"tiles={layout.tiles} with {name}={getattr(layout, name)!r}: set {name} = {words}, or tiles = 1"
    ranks = layout.dp_shard * layout.cp if layout.zero == 3 else 1
    whole = gcd(*widths)
    if model.hidden_size % ranks or whole % ranks:
        yield (
            f"tiles={layout.tiles} with zero=3 over {ranks} ranks, which do not divide hidden_size="
            f"{model.hidden_size} and intermediate_size={whole}; set tiles = 1, or other degrees"
        )
    elif whole // ranks % layout.tiles:
        most = whole // ranks
        use = ", ".join(str(tiles) for tiles in range(1, min(most, 64) + 1) if most % tiles == 0)
        yield (
            f"tiles={layout.tiles} does not divide the {most} columns of intermediate_size={whole} that each of "
            f"{ranks} ranks has; use {use}"
        )
