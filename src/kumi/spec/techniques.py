"""Which memory techniques this version's trainer has, and where: what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import gcd
from typing import Any

from kumi.spec.job import Job
from kumi.spec.layout import OFFLOAD, RECOMPUTE, Layout
from kumi.spec.legality import UNTRAINED, Rule, allows, others
from kumi.spec.model import MLP, ModelSpec, MoE
from kumi.spec.op import Op
from kumi.spec.process_groups import process_group
from kumi.spec.schedules import FULL_BACKWARD

# Elements of a bucket that the host updates at a time: long enough for a link's and a drive's full speed, small beside
# a model. And rooms that it has for buckets: for one that comes, one that is updated and one that goes.
BUCKET, ROOMS = 8 * 2**20, 3

# What tiles are trained with.
_WITH_TILES: dict[str, tuple[Any, ...]] = {
    "tp": (1,),
    "schedule": FULL_BACKWARD,
    "recompute": ("none", "full"),
    "offload": ("none", "optimizer", "optimizer-nvme", "activations"),
}

# The optimizers whose states may lie on the host and on its drives.
_OFFLOADED_OPTIMIZERS = ("adamw",)

# What products in float8 are trained with: all else multiplies elsewhere than in its layers.
_WITH_FLOAT8: dict[str, tuple[Any, ...]] = {"tp": (1,), "schedule": FULL_BACKWARD, "tiles": (1,)}


def is_tiled(model: ModelSpec, op: Op) -> bool:
    """Whether `op` belongs to a dense feed-forward layer, shared experts left out: what `layout.tiles` cuts."""
    inside = op.name.rpartition(".")[0].endswith(".mlp")
    return inside and not op.experts and "ffn" in (op.source.name, op.target.name)


def technique_rules(model: ModelSpec) -> Iterator[Rule]:
    """Return what this version's trainer wants of a layout that offloads, or computes in tiles."""
    yield from _offload(model)
    yield from _tiles(model)


def float8_rules(job: Job) -> Iterator[Rule]:
    """Return what this version's trainer wants of a layout where `job` multiplies in float8."""
    if job.precision.products != "float8":
        return
    device = job.cluster.device
    yield _rule(
        "float8",
        lambda x: device.kind == "cuda" and "float8" in device.dtypes,
        lambda layout: (
            f"precision.kind='fp8': this version multiplies in float8 on CUDA devices that have it, which "
            f"{device.name or 'this one'} does not say of itself; plan it, or set precision.kind = 'bf16'"
        ),
    )
    yield from (_beside_float8(name, allowed) for name, allowed in _WITH_FLOAT8.items())
    seq_len = job.batch.seq_len
    yield _rule(
        "float8",
        lambda x: x.microbatch * seq_len // x.cp % 16 == 0,
        lambda layout: (
            f"precision.kind='fp8' with {layout.microbatch * seq_len // layout.cp} tokens of a microbatch on a rank: "
            f"products in float8 take multiples of 16; change batch.seq_len or layout.microbatch"
        ),
    )


def _rule(about: str, holds: Callable[[Any], Any], say: Callable[[Layout], str], *after: str) -> Rule:
    return Rule(about, holds, say, ("degrees", *after), UNTRAINED)


def _words(values: Iterable[object]) -> str:
    return " or ".join(repr(value) for value in values)


def _beside_float8(name: str, allowed: tuple[Any, ...]) -> Rule:
    return _rule(
        "float8",
        allows(name, allowed),
        lambda layout: (
            f"precision.kind='fp8' with {name}={getattr(layout, name)!r}: set {name} = {_words(allowed)}, or "
            f"precision.kind = 'bf16'"
        ),
    )


def optimizer_rules(job: Job) -> Iterator[Rule]:
    """Return what this version's trainer wants of a layout that offloads the states of `job`'s optimizer."""
    kinds, without_states = _words(_OFFLOADED_OPTIMIZERS), ("none", "activations")
    yield _rule(
        "optimizer",
        lambda x: (job.optim.kind in _OFFLOADED_OPTIMIZERS) | x.one_of("offload", without_states),
        lambda layout: (
            f"optim.kind='{job.optim.kind}' with offload='{layout.offload}': this version offloads the states of "
            f"{kinds} only; set offload = 'none' or 'activations', or optim.kind = {kinds}"
        ),
    )


def _offload(model: ModelSpec) -> Iterator[Rule]:
    without_states = others(OFFLOAD, "states", "states-nvme")
    yield _rule(
        "states",
        lambda x: x.one_of("offload", without_states) | ((x.zero == 3) & (x.dp_shard * x.cp > 1)),
        lambda layout: (
            f"offload='{layout.offload}' with zero={layout.zero} over {layout.dp_shard * layout.cp} ranks: this "
            f"version keeps parameters on the host where zero = 3 divides them over several; set this, or "
            f"{_instead(layout)}"
        ),
    )
    if any(isinstance(layer.mlp, MoE) for layer in model.layers):
        yield _rule(
            "states of experts",
            lambda x: x.one_of("offload", without_states) | (process_group(x, "expert_data")[0] > 1),
            lambda layout: (
                f"offload='{layout.offload}' with ep={layout.ep} and expert_tp={layout.expert_tp}: this version keeps "
                f"on the device what no two ranks hold, as here all experts; use a smaller ep x expert_tp, or "
                f"{_instead(layout)}"
            ),
            "states",
        )
    others_move, others_recompute = others(OFFLOAD, "activations"), others(RECOMPUTE, "selective")
    yield _rule(
        "activations",
        lambda x: x.one_of("offload", others_move) | x.one_of("recompute", others_recompute),
        lambda layout: (
            "offload='activations' with recompute='selective': this version moves what layers keep whole; "
            "set recompute = 'none' or 'full'"
        ),
    )


def _instead(layout: Layout) -> str:
    return f"offload = '{layout.offload.replace('states', 'optimizer')}'"


def _tiles(model: ModelSpec) -> Iterator[Rule]:
    widths = sorted({layer.mlp.intermediate_size for layer in model.layers if isinstance(layer.mlp, MLP)})
    if not widths:
        yield _rule(
            "tiles",
            lambda x: x.tiles == 1,
            lambda layout: f"tiles={layout.tiles}, but the model has no dense feed-forward layers; set tiles = 1",
        )
        return
    yield from (_beside_tiles(name, allowed) for name, allowed in _WITH_TILES.items())
    size, width = model.hidden_size, gcd(*widths)
    yield _rule(
        "ranks of tiles",
        lambda x: (x.tiles == 1) | ((size % _shards(x) == 0) & (width % _shards(x) == 0)),
        lambda layout: (
            f"tiles={layout.tiles} with zero=3 over {_shards(layout)} ranks, which do not divide hidden_size="
            f"{size} and intermediate_size={width}; set tiles = 1, or other degrees"
        ),
    )
    yield _rule(
        "columns of tiles",
        lambda x: width // _shards(x) % x.tiles == 0,
        lambda layout: _uneven_tiles(layout, width),
        "ranks of tiles",
    )


def _shards(x: Any) -> Any:
    """Over how many ranks ZeRO-3 divides a matrix; 1 without it."""
    return 1 + (x.zero == 3) * (x.dp_shard * x.cp - 1)


def _beside_tiles(name: str, allowed: tuple[Any, ...]) -> Rule:
    fits = allows(name, allowed)
    return _rule(
        "tiles",
        lambda x: (x.tiles == 1) | fits(x),
        lambda layout: (
            f"tiles={layout.tiles} with {name}={getattr(layout, name)!r}: set {name} = {_words(allowed)}, or tiles = 1"
        ),
    )


def _uneven_tiles(layout: Layout, width: int) -> str:
    most = width // _shards(layout)
    use = ", ".join(str(tiles) for tiles in range(1, min(most, 64) + 1) if most % tiles == 0)
    return (
        f"tiles={layout.tiles} does not divide the {most} columns of intermediate_size={width} that each of "
        f"{_shards(layout)} ranks has; use {use}"
    )
