"""The loss and gradients of a step on this rank: an objective, which knows no layout, applied to the rank's batch.

A batch has columns, named tensors over its rows. Objectives that need them (KTO) get mismatched rows too, each a prompt
with the reply to another prompt; the names of their columns begin with "mismatched_".

Batches arrive on the CPU, where `shard_batch` reads them: the host never waits for the device to know the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.accelerator import is_gpu
from kumi.nn.attention.attention_context import document_bounds
from kumi.nn.lora import without_adapters
from kumi.objectives import (
    IGNORED,
    MISMATCHED,
    LinearObjective,
    MismatchedObjective,
    Objective,
    SegmentSums,
    SequenceObjective,
    TokenObjective,
    sequence_sums,
)
from kumi.parallel import context_parallel, pipeline
from kumi.parallel.data_parallel import reshard
from kumi.parallel.mesh import Mesh, all_reduce_sum
from kumi.parallel.pipeline_trace import PipelineTrace

# The columns of a batch that the decoder reads. `shard_batch` adds "head_positions" and `_CU_SEQLENS`.
_DECODER_COLUMNS = ("input_ids", "labels", "position_ids", "document_ids", "head_positions")
# The document boundaries of the unsharded rows (see `Decoder.forward`). This column stays on the CPU.
_CU_SEQLENS = "cu_seqlens"

# The least share of ignored labels for which the head leaves out their tokens. With fewer, picking the other tokens
# gains little: plain text, whose documents each end with an ignored label, is computed without picking.
LEAST_IGNORED_SHARE = 1 / 8

# labels (B, S) -> the flat positions of those that the head computes, or None for all.
LabelPositions = Callable[[Tensor], Tensor | None]


def trained_positions(labels: Tensor) -> Tensor | None:
    """Return the flat positions (N,) of the `labels` that are not ignored; None if too few are ignored.

    On a GPU the host would wait for `labels`.
    """
    positions = (labels.flatten() != IGNORED).nonzero()[:, 0]
    return positions if len(positions) <= (1 - LEAST_IGNORED_SHARE) * labels.numel() else None


def forward_backward(
    model: nn.Module,
    mesh: Mesh,
    objective: Objective,
    batches: Iterable[Mapping[str, Tensor]],
    units: float,
    trace: PipelineTrace | None = None,
    metrics: MetricSums | None = None,
    label_positions: LabelPositions = trained_positions,
) -> Tensor:
    """Compute the gradients of a step, and return this rank's part of the loss, a scalar.

    The sum of the parts over all ranks is the loss of the step.

    `batches`: microbatches of this data-parallel rank, unsharded rows, on the CPU.
    `units`: the number of units (such as tokens or pairs) in the step, over all ranks; the objective's loss is a mean
    over units. To multiply the loss by a loss scale, divide `units` by the scale.
    `trace`: receives the times of pipeline actions.
    `metrics`: receives this rank's sums of the objective's metrics.
    `label_positions`: returns the positions that the head computes.
    """
    sharded = prepare_batches(model, mesh, objective, batches, label_positions)
    if objective.rows.mismatched:
        statistics = all_reduce_sum(mismatched_statistics(model, mesh, objective, sharded), mesh)
        sharded = [{**batch, "statistics": statistics} for batch in sharded]
    microbatches = [training_inputs(objective, batch, mesh, units, metrics) for batch in sharded]
    loss = pipeline.train_microbatches(model, mesh, microbatches, trace)
    return loss if adds_to_loss(objective, mesh) else loss.zero_()


class MetricSums:
    """The sums of an objective's metrics over the microbatches of this rank.

    `names`: the metrics; by default those of the objective.
    `sums` (metrics, 2): a sum and the number of its terms for each metric, as the objective's `measure` returns them.
    """

    def __init__(self, objective: Objective, mesh: Mesh, names: Sequence[str] | None = None) -> None:
        self.names = objective.metrics if names is None else names
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
    """Return for each of `batches`, results of `shard_batch`, the sums of the log-probs of its sequences, float64 (B,
    G) for at most G sequences in a row; an empty list on ranks without the head.

    `prefix`: the beginning of the columns' names, "mismatched_" for mismatched rows.
    """
    outputs = pipeline.forward_microbatches(model, mesh, [decoder_inputs(batch, prefix) for batch in batches])
    sums = segment_sums(mesh)
    return [sequence_sums(log_probs, batch, sums, prefix) for batch, log_probs in zip(batches, outputs)]


def prepare_batches(
    model: nn.Module,
    mesh: Mesh,
    objective: Objective,
    batches: Iterable[Mapping[str, Tensor]],
    label_positions: LabelPositions = trained_positions,
) -> list[dict[str, Tensor]]:
    """Return this rank's positions of `batches`, with the log-probs of the reference if the objective compares with it.

    Batches without a reference's log-probs get those of the model without its adapters, in a pass without gradients.
    """
    sharded = [shard_batch(objective, batch, mesh, label_positions) for batch in batches]
    prefixes = ("", MISMATCHED) if objective.rows.mismatched else ("",)
    if objective.reference and sharded and "reference" not in sharded[0]:
        with without_adapters(model), evaluating(model):
            for prefix in prefixes:
                # Ranks without the head need no reference.
                for batch, totals in zip(sharded, sum_sequences(model, mesh, sharded, prefix)):
                    batch[f"{prefix}reference"] = totals
    return sharded


def mismatched_statistics(
    model: nn.Module, mesh: Mesh, objective: Objective, batches: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    """Return this rank's part of the objective's statistics of the mismatched rows of `batches`, results of
    `prepare_batches`, (2,) float64. The sum of the parts over all ranks is the column "statistics"."""
    assert isinstance(objective, MismatchedObjective)
    part = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    with evaluating(model):
        for batch, totals in zip(batches, sum_sequences(model, mesh, batches, MISMATCHED)):
            part += objective.statistics(totals, batch) if adds_to_loss(objective, mesh) else 0.0
    return part


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


def shard_batch(
    objective: Objective, batch: Mapping[str, Tensor], mesh: Mesh, label_positions: LabelPositions = trained_positions
) -> dict[str, Tensor]:
    """Return this context-parallel rank's positions of `batch`, on its device.

    The column "head_positions" has the `label_positions`, unless they are None; mismatched rows have such columns of
    their own. The column `_CU_SEQLENS` has the boundaries of packed documents, and remains on the CPU, where the host
    reads it.
    """
    by_position = [name for name, along in objective.columns.items() if along == "token"]
    rows = {name: column for name, column in batch.items() if not name.startswith(MISMATCHED)}
    mismatched = {name.removeprefix(MISMATCHED): batch[name] for name in batch if name not in rows}
    result: dict[str, Tensor] = {}
    for prefix, columns in (("", rows), (MISMATCHED, mismatched)):
        if columns:
            columns = _with_bounds(columns, mesh.device)
            sharded = context_parallel.shard_sequence(columns, mesh, also=by_position)
            positions = label_positions(sharded["labels"])
            if positions is not None:
                sharded = {**sharded, "head_positions": positions}
            result |= {prefix + name: column for name, column in sharded.items()}
    return {
        name: column if name.endswith(_CU_SEQLENS) else _to_device(column, mesh.device)
        for name, column in result.items()
    }


def _to_device(column: Tensor, device: torch.device) -> Tensor:
    """Return `column` on `device`. From pinned memory the copy to a GPU does not make the host wait."""
    return (column.pin_memory() if is_gpu(device) else column).to(device, non_blocking=True)


def _with_bounds(columns: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return `columns`, which are on the CPU, with the boundaries of the documents that their rows hold.

    If each row is one document, `document_ids` are left out: attention on a GPU then takes the kernel for whole rows,
    which is the fastest. On a CPU they stay, because they do not change its kernel.
    """
    if "document_ids" not in columns:
        return columns
    ids = columns["document_ids"]
    bounds = document_bounds(ids)
    if device.type != "cpu" and len(bounds) == len(ids) + 1:
        return {name: column for name, column in columns.items() if name != "document_ids"}
    return {**columns, _CU_SEQLENS: bounds}


def decoder_inputs(batch: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any]:
    """Return the columns of `batch` that the decoder reads to return log-probs.

    `prefix`: the beginning of their names in `batch`, which the result leaves out.
    """
    inputs: dict[str, Any] = {name: batch[prefix + name] for name in _DECODER_COLUMNS if prefix + name in batch}
    if prefix + _CU_SEQLENS in batch:
        inputs[_CU_SEQLENS] = tuple(batch[prefix + _CU_SEQLENS].tolist())
    return inputs


def training_inputs(
    objective: Objective, batch: Mapping[str, Tensor], mesh: Mesh, units: float, metrics: MetricSums | None = None
) -> dict[str, Any]:
    """Return the arguments with which the decoder returns the loss of `batch`, a result of `shard_batch`."""
    if isinstance(objective, LinearObjective):
        return {**decoder_inputs(batch), "token_weights": objective.token_weights(batch, units)}
    sums = segment_sums(mesh)

    def loss(log_probs: Tensor) -> Tensor:
        if isinstance(objective, SequenceObjective):
            totals = sequence_sums(log_probs, batch, sums)
            if metrics is not None:
                metrics.add(objective.measure(totals.detach(), batch))
            return objective.sequence_loss(totals, batch, units).to(log_probs.dtype)
        if metrics is not None and isinstance(objective, TokenObjective):
            metrics.add(objective.measure(log_probs.detach(), batch, sums))
        return objective.loss(log_probs, batch, units, sums)

    return {**decoder_inputs(batch), "loss": loss}


def adds_to_loss(objective: Objective, mesh: Mesh) -> bool:
    """Return True if this rank's loss is added to the sum over ranks.

    All ranks of a tensor-parallel group compute the same loss, so only the first is added. Context-parallel ranks
    compute parts of a linear objective's loss, which are all added. Of any other objective, each context-parallel rank
    computes the full loss, so only the first is added.
    """
    return mesh.index("tp") == 0 and (isinstance(objective, LinearObjective) or mesh.index("cp") == 0)


def segment_sums(mesh: Mesh) -> SegmentSums:
    """Return a function that sums per-token numbers over segments of the unsharded rows."""
    return partial(_segment_sums, mesh.groups["cp"] if mesh.layout.cp > 1 else None)


def _segment_sums(group: dist.ProcessGroup | None, x: Tensor, segments: Tensor, count: int) -> Tensor:
    """Return the sums (B, count) of `x` (B, S) over the segments 0 to count - 1; `segments` (B, S) has each token's."""
    local = x.new_zeros(len(x), count).scatter_add(1, segments, x)
    if group is None:
        return local
    total = local.detach().clone()
    dist.all_reduce(total, group=group)
    # Add the other ranks' tokens without a gradient: their gradients are computed on their own ranks.
    return local + (total - local.detach())
