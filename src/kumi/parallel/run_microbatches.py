"""The loss of a step on this rank: an objective, which knows no layout, applied to what the layout gives this rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from kumi.objectives import LinearObjective, Objective, SegmentSums
from kumi.parallel import context_parallel, pipeline
from kumi.parallel.mesh import Mesh
from kumi.parallel.pipeline_trace import Record

# The columns of a batch that the decoder reads.
DECODER_COLUMNS = ("input_ids", "labels", "position_ids", "document_ids")


def forward_backward(
    model: nn.Module,
    mesh: Mesh,
    objective: Objective,
    batches: Iterable[Mapping[str, Tensor]],
    units: float,
    record: Record | None = None,
) -> Tensor:
    """Return this rank's part of the loss, a scalar; gradients are then complete.

    `batches` are this data-parallel rank's microbatches, whole rows; `units` is what the objective counts in the whole
    step, over all ranks. Summed over all ranks the parts are the loss of the step. A factor for the loss, such as
    float16's, divides `units`.
    """
    microbatches = [training_inputs(objective, cut(objective, batch, mesh), mesh, units) for batch in batches]
    loss = pipeline.train(model, mesh, microbatches, record)
    return loss if counts_loss(objective, mesh) else loss.zero_()


def cut(objective: Objective, batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return the part of the columns of `batch` that this context-parallel rank has."""
    by_position = [name for name, along in objective.columns.items() if along == "token"]
    return context_parallel.cut(dict(batch), mesh, also=by_position)


def decoder_inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the columns of `batch` that the decoder reads: given these it returns log-probs."""
    return {name: batch[name] for name in DECODER_COLUMNS if name in batch}


def training_inputs(objective: Objective, batch: Mapping[str, Tensor], mesh: Mesh, units: float) -> dict[str, Any]:
    """Return the decoder's arguments for `batch`, which `cut` returned, that make it return the loss."""
    if isinstance(objective, LinearObjective):
        return {**decoder_inputs(batch), "token_weights": objective.token_weights(batch, units)}
    loss = partial(objective.loss, batch=batch, units=units, sums=segment_sums(mesh))
    return {**decoder_inputs(batch), "loss": loss}


def counts_loss(objective: Objective, mesh: Mesh) -> bool:
    """Return whether the loss on this rank is added to the sum over ranks.

    All ranks of a tensor-parallel group compute the same loss: the first counts. Context-parallel ranks compute parts
    of a linear objective's loss, which all count; of another objective each computes the whole loss: the first counts.
    """
    return mesh.index("tp") == 0 and (isinstance(objective, LinearObjective) or mesh.index("cp") == 0)


def segment_sums(mesh: Mesh) -> SegmentSums:
    """Return the function that sums numbers of tokens over segments of whole rows on the ranks of `mesh`."""
    return partial(_segment_sums, mesh.groups["cp"] if mesh.layout.cp > 1 else None)


def _segment_sums(group: dist.ProcessGroup | None, x: Tensor, segments: Tensor, count: int) -> Tensor:
    own = x.new_zeros(len(x), count).scatter_add(1, segments, x)
    if group is None:
        return own
    whole = own.detach().clone()
    dist.all_reduce(whole, group=group)
    # The other ranks' tokens count, and have their gradients there.
    return own + (whole - own.detach())
