"""The loss and gradients of a step on this rank: an objective, which knows no layout, applied to the rank's batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.nn.lora import without_adapters
from kumi.objectives import MISMATCHED, LinearObjective, Objective, SegmentSums, SequenceObjective, sequence_sums
from kumi.parallel import context_parallel, pipeline
from kumi.parallel.data_parallel import reshard
from kumi.parallel.mesh import Mesh, all_reduce_sum
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
    metrics: MetricSums | None = None,
) -> Tensor:
    """Compute the gradients of a step, and return this rank's part of the loss, a scalar.

    The sum of the parts over all ranks is the loss of the step.

    `batches`: microbatches of this data-parallel rank, unsharded rows.
    `units`: the number of units in the step, over all ranks; the objective's loss is a mean over units. To multiply the
    loss by a loss scale, divide `units` by it.
    `trace`: receives the times of pipeline actions.
    `metrics`: receives this rank's sums of the objective's metrics.
    """
    sharded = prepare_batches(model, mesh, objective, batches)
    microbatches = [training_inputs(objective, batch, mesh, units, metrics) for batch in sharded]
    loss = pipeline.train_microbatches(model, mesh, microbatches, trace)
    return loss if adds_to_loss(objective, mesh) else loss.zero_()


class MetricSums:
    """The sums of an objective's metrics over the microbatches of this rank, (metrics, 2): see
    `SequenceObjective.measure`."""

    def __init__(self, objective: Objective, mesh: Mesh) -> None:
        self.names = objective.metrics if isinstance(objective, SequenceObjective) else ()
        self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=mesh.device)
        self._counts = adds_to_loss(objective, mesh)

    def add(self, measured: Tensor) -> None:
        """Add the sums of one microbatch."""
        if self._counts:
            self.sums += measured


@torch.no_grad()
def sum_sequences(
    model: nn.Module, mesh: Mesh, batches: Sequence[Mapping[str, Tensor]], prefix: str = ""
) -> list[Tensor]:
    """Return the sums (B, G) of the log-probs of the sequences of each of `batches`, results of `shard_batch`, float64;
    an empty list on ranks without the head.

    `prefix`: of the columns, "mismatched_" for mismatched rows.
    """
    outputs = pipeline.forward_microbatches(model, mesh, [decoder_inputs(batch, prefix) for batch in batches])
    sums = segment_sums(mesh)
    return [sequence_sums(log_probs, batch, sums, prefix) for batch, log_probs in zip(batches, outputs)]


def prepare_batches(
    model: nn.Module, mesh: Mesh, objective: Objective, batches: Iterable[Mapping[str, Tensor]]
) -> list[dict[str, Tensor]]:
    """Return this rank's positions of `batches`, with the columns of the objective that only the model can compute.

    These are the log-probs of a reference that is the model without its adapters, unless the batches have the
    reference's log-probs already, and the statistics of mismatched rows. No gradients are computed.
    """
    sharded = [shard_batch(objective, batch, mesh) for batch in batches]
    prefixes = ("", MISMATCHED) if objective.rows.mismatched else ("",)
    if objective.reference and sharded and "reference" not in sharded[0]:
        with without_adapters(model), evaluating(model):
            for prefix in prefixes:
                # Ranks without the head need no reference.
                for batch, totals in zip(sharded, sum_sequences(model, mesh, sharded, prefix)):
                    batch[f"{prefix}reference"] = totals
    if objective.rows.mismatched:
        assert isinstance(objective, SequenceObjective)
        statistics = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        with evaluating(model):
            for batch, totals in zip(sharded, sum_sequences(model, mesh, sharded, MISMATCHED)):
                statistics += objective.statistics(totals, batch) if adds_to_loss(objective, mesh) else 0.0
        statistics = all_reduce_sum(statistics, mesh)
        sharded = [{**batch, "statistics": statistics} for batch in sharded]
    return sharded


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which `model` computes as in evaluation, without dropout; parameters are sharded again after it."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        reshard(model)


def shard_batch(objective: Objective, batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Return the positions of `batch` of this context-parallel rank."""
    by_position = [name for name, along in objective.columns.items() if along == "token"]
    rows = {name: column for name, column in batch.items() if not name.startswith(MISMATCHED)}
    mismatched = {name.removeprefix(MISMATCHED): batch[name] for name in batch if name not in rows}
    sharded = context_parallel.shard_sequence(rows, mesh, also=by_position)
    if mismatched:
        others = context_parallel.shard_sequence(mismatched, mesh, also=by_position)
        sharded |= {MISMATCHED + name: column for name, column in others.items()}
    return sharded


def decoder_inputs(batch: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """Return the columns of `batch` that the decoder reads to return log-probs.

    `prefix`: of their names in `batch`.
    """
    return {name: batch[prefix + name] for name in _DECODER_COLUMNS if prefix + name in batch}


def training_inputs(
    objective: Objective, batch: Mapping[str, Tensor], mesh: Mesh, units: float, metrics: MetricSums | None = None
) -> dict[str, Any]:
    """Return the arguments with which the decoder returns the loss of `batch`, a result of `shard_batch`."""
    if isinstance(objective, LinearObjective):
        return {**decoder_inputs(batch), "token_weights": objective.token_weights(batch, units)}
    if not isinstance(objective, SequenceObjective):
        return {
            **decoder_inputs(batch),
            "loss": partial(objective.loss, batch=batch, units=units, sums=segment_sums(mesh)),
        }

    def loss(log_probs: Tensor) -> Tensor:
        totals = sequence_sums(log_probs, batch, segment_sums(mesh))
        if metrics is not None:
            metrics.add(objective.measure(totals.detach(), batch))
        return objective.sequence_loss(totals, batch, units).to(log_probs.dtype)

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
