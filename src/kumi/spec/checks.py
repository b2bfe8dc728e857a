"""What is illegal, in sentences. The search prunes with this and the trainer refuses with it."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec
from kumi.spec.layout import RECOMPUTE, Layout
from kumi.spec.model import ModelSpec


def problems(model: ModelSpec, layout: Layout, cluster: ClusterSpec, batch: BatchSpec) -> list[str]:
    """Everything that keeps `model` from training on `cluster` with `layout` and `batch`; empty when nothing does."""
    return list(_degrees(layout)) or [*_layout(layout), *_cluster(layout, cluster), *_batch(model, layout, batch)]


def divisors(number: int) -> list[int]:
    """The divisors of `number`, ascending."""
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]


def _choices(number: int) -> str:
    listed = [str(value) for value in divisors(number)]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"


def _degrees(layout: Layout) -> Iterator[str]:
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "microbatch"):
        if getattr(layout, axis) < 1:
            yield f"{axis}={getattr(layout, axis)} is not a degree; use 1 or more"


def _layout(layout: Layout) -> Iterator[str]:
    for axis in ("pp", "cp", "tp", "ep"):
        if getattr(layout, axis) > 1:
            yield f"{axis}={getattr(layout, axis)}: this version splits the data axes only; set {axis} = 1"
    if layout.zero not in (0, 1, 2, 3):
        yield f"zero={layout.zero} is not a ZeRO stage; use 0, 1, 2 or 3"
    elif layout.zero > 0 and layout.dp_shard == 1 and layout.dp_replicate > 1:
        yield (f"zero={layout.zero} divides states over dp_shard, which is 1; "
               f"set dp_shard = {layout.dp_replicate} and dp_replicate = 1")  # fmt: skip
    elif layout.zero == 0 and layout.dp_shard > 1:
        yield (f"zero=0 divides nothing, but dp_shard={layout.dp_shard}; "
               f"set zero = 1, 2 or 3, or dp_replicate = {layout.dp} and dp_shard = 1")  # fmt: skip
    if layout.recompute not in RECOMPUTE:
        yield f"recompute='{layout.recompute}' is unknown; use {', '.join(RECOMPUTE)}"


def _cluster(layout: Layout, cluster: ClusterSpec) -> Iterator[str]:
    if layout.world_size != cluster.devices:
        yield (f"the layout needs {layout.world_size} devices (pp {layout.pp} x dp_replicate {layout.dp_replicate} x "
               f"dp_shard {layout.dp_shard} x cp {layout.cp} x tp {layout.tp}), the cluster has {cluster.devices}; "
               f"degrees must multiply to {cluster.devices}")  # fmt: skip


def _batch(model: ModelSpec, layout: Layout, batch: BatchSpec) -> Iterator[str]:
    if batch.seq_len > model.max_position_embeddings:
        yield (f"seq_len={batch.seq_len} is longer than max_position_embeddings={model.max_position_embeddings}; "
               f"shorten seq_len or extend the model's rope")  # fmt: skip
    if batch.tokens_per_step % batch.seq_len:
        near = max(1, round(batch.tokens_per_step / batch.seq_len)) * batch.seq_len
        yield f"seq_len={batch.seq_len} does not divide tokens_per_step={batch.tokens_per_step}; use {near}"
    elif batch.sequences % layout.dp:
        yield (f"dp={layout.dp} does not divide the {batch.sequences} sequences of a step; "
               f"use {_choices(batch.sequences)} data-parallel ranks, or change tokens_per_step")  # fmt: skip
    elif batch.sequences // layout.dp % layout.microbatch:
        yield (f"microbatch={layout.microbatch} does not divide the {batch.sequences // layout.dp} sequences "
               f"that each rank has in a step; use {_choices(batch.sequences // layout.dp)}")  # fmt: skip
