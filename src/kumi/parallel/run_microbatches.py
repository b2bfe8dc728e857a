"""The loss and gradients of a step on this rank: an objective, which knows no layout, applied to the rank's batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from kumi.objectives import LinearObjective, Objective, SegmentSums
from kumi.parallel import context_parallel, pipeline
from kumi.parallel.mesh import Mesh
from kumi.parallel.pipeline_trace import PipelineTrace

# The columns of a batch that the decoder reads.
_DECODER_COLUMNS = ("input_ids", "labels", "position_ids", "document_ids")


def forward_backward(
    model: nn.Module,
    mesh: Mesh,
    objective: Objective,
    batches: Iterable[Mapping[str, Tensor]],
    units: float,
    trace: PipelineTrace | None = None,
) -> Tensor:
    """Compute the gradients of a step, and return this rank's part of the loss, a scalar.

    The sum of the parts over all ranks is the loss of the step.

    `batches`: microbatches of this data-parallel rank, unsharded rows.
    `units`: the number of units in the step, over all ranks; the objective's loss is a mean over units. To multiply the
    loss by a loss scale, divide `units` by it.
    `trace`: receives the times of pipeline actions.
    """
    microbatches = [training_inputs(objective, shard_batch(objective, batch, mesh), mesh, units) for batch in batches]
    loss = pipeline.train_microbatches(model, mesh, microbatches, trace)
    return loss if adds_to_loss(objective, mesh) else loss.zero_()


def shard_batch(objective: Objective, batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return the positions of `batch` of this context-parallel rank."""
    by_position = [name for name, along in objective.columns.items() if along == "token"]
    return context_parallel.shard_sequence(dict(batch), mesh, also=by_position)


def decoder_inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the columns of `batch` that the decoder reads to return log-probs."""
    return {name: batch[name] for name in _DECODER_COLUMNS if name in batch}


def training_inputs(objective: Objective, batch: Mapping[str, Tensor], mesh: Mesh, units: float) -> dict[str, Any]:
    """Return the arguments with which the decoder returns the loss of `batch`, a result of `shard_batch`."""
    if isinstance(objective, LinearObjective):
        return {**decoder_inputs(batch), "token_weights": objective.token_weights(batch, units)}
    loss = partial(objective.loss, batch=batch, units=units, sums=segment_sums(mesh))
    return {**decoder_inputs(batch), "loss": loss}


def adds_to_loss(objective: Objective, mesh: Mesh) -> bool:
    """Return True if this rank's loss is added to the sum over ranks.

    All ranks of a tensor-parallel group compute the same loss, so only the first is added. Context-parallel ranks
    compute parts of a linear objective's loss, which are all added. Each computes the full loss of any other objective,
    so only the first is added.
    """
    return mesh.index("tp") == 0 and (isinstance(objective, LinearObjective) or mesh.index("cp") == 0)


def segment_sums(mesh: Mesh) -> SegmentSums:
    """Return a function that sums per-token numbers over segments of the unsharded rows."""
    return partial(_segment_sums, mesh.groups["cp"] if mesh.layout.cp > 1 else None)


def _segment_sums(group: dist.ProcessGroup | None, x: Tensor, segments: Tensor, count: int) -> Tensor:
    local = x.new_zeros(len(x), count).scatter_add(1, segments, x)
    if group is None:
        return local
    total = local.detach().clone()
    dist.all_reduce(total, group=group)
    # Add the other ranks' tokens without a gradient: their gradients are computed on their own ranks.
    return local + (total - local.detach())
