"""The rules of this version's trainer for offloading, tiled feed-forward layers (`layout.tiles`) and float8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import gcd
from typing import Any

from kumi.spec.job import Job
from kumi.spec.layout import OFFLOAD, RECOMPUTE, Layout
from kumi.spec.legality import UNSUPPORTED, LayoutRule, all_but, is_one_of
from kumi.spec.model import MLP, ModelSpec, MoE
from kumi.spec.op import Op
from kumi.spec.process_groups import process_group
from kumi.spec.schedules import FULL_BACKWARD

# The host updates parameters in buckets of this many elements: enough for the full bandwidth of a link or a drive, but
# few compared with a model. It has three staging buffers: one bucket arrives, one is updated, one leaves.
HOST_BUCKET_ELEMENTS, STAGING_BUFFERS = 8 * 2**20, 3

# Field -> the values that are supported with tiles > 1.
_WITH_TILES: dict[str, tuple[Any, ...]] = {
    "tp": (1,),
    "schedule": FULL_BACKWARD,
    "recompute": ("none", "full"),
    "offload": ("none", "optimizer", "optimizer-nvme", "activations"),
}

# The optimizers whose states can be offloaded to the host and to its drives.
_OFFLOADED_OPTIMIZERS = ("adamw",)

# Field -> the values that are supported with float8. With other values the trainer computes some matmuls without the
# linear layer's module, so they would not run in float8.
_WITH_FLOAT8: dict[str, tuple[Any, ...]] = {"tp": (1,), "schedule": FULL_BACKWARD, "tiles": (1,)}


def is_tiled(model: ModelSpec, op: Op) -> bool:
    """True if `layout.tiles` splits `op`: it is part of a dense feed-forward layer, and not of shared experts."""
    inside = op.name.rpartition(".")[0].endswith(".mlp")
    return inside and not op.experts and "ffn" in (op.source.name, op.target.name)


def technique_rules(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the trainer's rules for offloading and for tiles."""
    yield from _offload(model)
    yield from _tiles(model)


def float8_rules(job: Job) -> Iterator[LayoutRule]:
    """Yield the trainer's rules for a `job` with float8 matmuls."""
    if job.precision.products != "float8":
        return
    device = job.cluster.device
    yield _rule(
        "float8",
        lambda x: device.is_gpu and "float8" in device.dtypes,
        lambda layout: (
            f"precision.kind='fp8' needs a CUDA device that is described with float8 matmuls, but the device is "
            f"{device.name or 'unnamed'}; use another device, or set precision.kind = 'bf16'"
        ),
    )
    yield from (_float8_rule(name, allowed) for name, allowed in _WITH_FLOAT8.items())
    seq_len = job.batch.seq_len
    yield _rule(
        "float8",
        lambda x: x.microbatch * seq_len // x.cp % 16 == 0,
        lambda layout: (
            f"precision.kind='fp8' needs a multiple of 16 tokens per microbatch and rank, but there are "
            f"{layout.microbatch * seq_len // layout.cp}; change batch.seq_len or layout.microbatch"
        ),
    )


def _rule(topic: str, holds: Callable[[Any], Any], message: Callable[[Layout], str], *after: str) -> LayoutRule:
    """Return a rule of the trainer, which is skipped if a rule of one of the topics `after` is broken."""
    return LayoutRule(topic, holds, message, ("degrees", *after), UNSUPPORTED)


def _quoted(values: Iterable[object]) -> str:
    return " or ".join(repr(value) for value in values)


def _float8_rule(name: str, allowed: tuple[Any, ...]) -> LayoutRule:
    """Return the rule that the field `name` has a value of `allowed` with float8."""
    return _rule(
        "float8",
        is_one_of(name, allowed),
        lambda layout: (
            f"precision.kind='fp8' is not supported with {name}={getattr(layout, name)!r}; set {name} = "
            f"{_quoted(allowed)}, or precision.kind = 'bf16'"
        ),
    )


def optimizer_rules(job: Job) -> Iterator[LayoutRule]:
    """Yield the trainer's rule for offloading the states of the optimizer of `job`."""
    kinds, states_on_device = _quoted(_OFFLOADED_OPTIMIZERS), ("none", "activations")
    yield _rule(
        "optimizer",
        lambda x: (job.optim.kind in _OFFLOADED_OPTIMIZERS) | x.one_of("offload", states_on_device),
        lambda layout: (
            f"optim.kind='{job.optim.kind}' is not supported with offload='{layout.offload}', which is implemented for "
            f"{kinds} only; set offload = 'none' or 'activations', or optim.kind = {kinds}"
        ),
    )


def _offload(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules for moving the parameters of `model`, or its saved activations, to the host."""
    params_on_device = all_but(OFFLOAD, "states", "states-nvme")
    yield _rule(
        "states",
        lambda x: x.one_of("offload", params_on_device) | ((x.zero == 3) & (x.dp_shard * x.cp > 1)),
        lambda layout: (
            f"offload='{layout.offload}' moves parameters to the host, which needs zero=3 over 2 or more ranks, not "
            f"zero={layout.zero} over {layout.dp_shard * layout.cp}; set zero = 3 with dp_shard x cp > 1, or "
            f"{_optimizer_only(layout)}"
        ),
    )
    if any(isinstance(layer.mlp, MoE) for layer in model.layers):
        yield _rule(
            "states of experts",
            lambda x: x.one_of("offload", params_on_device) | (process_group(x, "expert_data")[0] > 1),
            lambda layout: (
                f"offload='{layout.offload}' cannot move the experts to the host, because with ep={layout.ep} and "
                f"expert_tp={layout.expert_tp} ZeRO does not shard them; use a smaller ep x expert_tp, or "
                f"{_optimizer_only(layout)}"
            ),
            "states",
        )
    without_activations, without_selective = all_but(OFFLOAD, "activations"), all_but(RECOMPUTE, "selective")
    yield _rule(
        "activations",
        lambda x: x.one_of("offload", without_activations) | x.one_of("recompute", without_selective),
        lambda layout: (
            "offload='activations' is not supported with recompute='selective', because it moves all activations of a "
            "layer; set recompute = 'none' or 'full'"
        ),
    )


def _optimizer_only(layout: Layout) -> str:
    """Return the setting that offloads only the optimizer states."""
    return f"offload = '{layout.offload.replace('states', 'optimizer')}'"


def _tiles(model: ModelSpec) -> Iterator[LayoutRule]:
    """Yield the rules for splitting the dense feed-forward layers of `model` into tiles."""
    widths = sorted({layer.mlp.intermediate_size for layer in model.layers if isinstance(layer.mlp, MLP)})
    if not widths:
        yield _rule(
            "tiles",
            lambda x: x.tiles == 1,
            lambda layout: (
                f"tiles={layout.tiles} splits dense feed-forward layers, but the model has none; set tiles = 1"
            ),
        )
        return
    yield from (_tiles_rule(name, allowed) for name, allowed in _WITH_TILES.items())
    size, width = model.hidden_size, gcd(*widths)
    yield _rule(
        "ranks of tiles",
        lambda x: (x.tiles == 1) | ((size % _shards(x) == 0) & (width % _shards(x) == 0)),
        lambda layout: (
            f"tiles={layout.tiles} with zero=3 needs a number of shards that divides hidden_size={size} and "
            f"intermediate_size={width}, not {_shards(layout)}; set tiles = 1, or change dp_shard x cp"
        ),
    )
    yield _rule(
        "columns of tiles",
        lambda x: width // _shards(x) % x.tiles == 0,
        lambda layout: _uneven_tiles(layout, width),
        "ranks of tiles",
    )


def _shards(x: Any) -> Any:
    """Return the number of ranks over which ZeRO-3 shards a matrix; 1 at other stages."""
    return 1 + (x.zero == 3) * (x.dp_shard * x.cp - 1)


def _tiles_rule(name: str, allowed: tuple[Any, ...]) -> LayoutRule:
    """Return the rule that the field `name` has a value of `allowed` with more than one tile."""
    fits = is_one_of(name, allowed)
    return _rule(
        "tiles",
        lambda x: (x.tiles == 1) | fits(x),
        lambda layout: (
            f"tiles={layout.tiles} is not supported with {name}={getattr(layout, name)!r}; set {name} = "
            f"{_quoted(allowed)}, or tiles = 1"
        ),
    )


def _uneven_tiles(layout: Layout, width: int) -> str:
    columns = width // _shards(layout)
    use = ", ".join(str(tiles) for tiles in range(1, min(columns, 64) + 1) if columns % tiles == 0)
    return (
        f"tiles={layout.tiles} does not divide the {columns} columns of intermediate_size={width} in each of "
        f"{_shards(layout)} shards; set tiles to one of {use}"
    )
