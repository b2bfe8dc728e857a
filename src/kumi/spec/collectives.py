"""Which collectives the data axes ask for in a step. The trainer is tested against it; a cost model can price it."""

from __future__ import annotations

from dataclasses import dataclass

from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.sharding import units


@dataclass(frozen=True)
class Collectives:
    """How many collectives of each kind a rank takes part in during one step, gradient norm included.

    `all_reduce` does not count those of plain data parallelism: DDP cuts gradients into buckets of its own choice, and
    what it sends is one all-reduce's worth of all gradients.
    """

    all_gather: int
    reduce_scatter: int
    all_reduce: int


def data_collectives(model: ModelSpec, layout: Layout, microbatches: int) -> Collectives:
    """The collectives of the parameters and gradients of `model` in a step of `microbatches` microbatches.

    ZeRO-1 and 2 gather every unit once a step. ZeRO-3 gathers it in every forward, and again in the backward, except
    the root unit and the last layer, which are still there, and the embedding, whose backward needs no weights. ZeRO-1
    reduces gradients in the last microbatch, the others in each. Replicas of shards are summed in the last.
    """
    if layout.zero == 0 or layout.dp_shard == 1:
        return Collectives(0, 0, 0)
    count = len(units(model))
    again = model.num_hidden_layers - 1
    gathers = microbatches * (count + again) if layout.zero == 3 else count
    reduces = count if layout.zero == 1 else microbatches * count
    replicas = count if layout.dp_replicate > 1 else 0
    return Collectives(gathers, reduces, replicas + 1)
