"""The loss on held-out documents or examples, of all sources and of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kumi.data import Batch
from kumi.objectives import IGNORED, LinearObjective, SequenceObjective, sequence_sums
from kumi.parallel import pipeline
from kumi.parallel.data_parallel import reshard
from kumi.parallel.mesh import all_reduce_sum, is_loss_rank
from kumi.parallel.run_microbatches import (
    MetricSums,
    adds_to_loss,
    decoder_inputs,
    mismatched_statistics,
    prepare_batches,
    segment_sums,
)
from kumi.train.step import as_tensors
from kumi.train.train_state import RankState


@dataclass(frozen=True)
class Loss:
    """A loss on held-out sequences. An objective averages over units, which are tokens for language modelling."""

    loss: float  # mean per held-out unit, in nats
    tokens: int  # held-out trained tokens (see `Objective.tokens`)
    units: float  # held-out units that the objective counts
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the objective, by name


@dataclass(frozen=True)
class Evaluation(Loss):
    """The result of an evaluation: the loss on all sources, and on each of several sources by its name."""

    sources: Mapping[str, Loss] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Return the loss and the metrics by name, and those of sources under `<name>/<source>`."""
        result = {"loss": self.loss} | {f"loss/{source}": each.loss for source, each in self.sources.items()}
        result |= self.metrics
        for source, each in self.sources.items():
            result |= {f"{name}/{source}": value for name, value in each.metrics.items()}
        return result


@torch.no_grad()
def evaluate(rank_state: RankState, *, first: int | None = None) -> Evaluation:
    """Return the loss on the run's held-out sequences, or only on the first `first` of them, without losses of sources.

    Each data-parallel rank computes some of the sequences; the result is that of all ranks' sequences.
    """
    assert rank_state.validation is not None
    layout, size = rank_state.run.layout, rank_state.run.layout.microbatch
    source_names, spans = rank_state.store.validation_names, rank_state.validation.spans
    if first is not None:
        source_names, spans = source_names[:1], [(0, first)]
    # The stages of a pipeline work at the same time on the microbatches of one call.
    mesh, per_call = rank_state.mesh, 1 if layout.pp == 1 else 4 * layout.pp
    # For each source, the sums of losses, of units that the objective counts, of tokens, and of the objective's
    # metrics.
    losses = torch.zeros(len(spans), dtype=torch.float64, device=mesh.device)
    units, tokens, objective = [0.0] * len(spans), [0] * len(spans), rank_state.objective
    names = objective.evaluated if isinstance(objective, LinearObjective) else None
    metrics = [MetricSums(objective, mesh, names) for _ in spans]
    rank_state.model.eval()
    # Every rank runs the same number of microbatches, because all ranks all-gather sharded parameters together.
    # Sequences past the end of a source are padding.
    microbatches = [
        (source, begin + layout.dp_index(mesh.rank) * size, stop)
        for source, (start, stop) in enumerate(spans)
        for begin in range(start, stop, layout.dp * size)
    ]
    groups = [microbatches[begin : begin + per_call] for begin in range(0, len(microbatches), per_call)]
    mismatched = _mismatched_statistics(rank_state, groups, len(spans)) if objective.rows.mismatched else None
    for group in groups:
        full_batches, batches = _read(rank_state, group)
        if is_loss_rank(mesh):
            for (source, _, _), full_batch in zip(group, full_batches, strict=True):
                units[source] += objective.count(full_batch)
                tokens[source] += objective.tokens(full_batch)
        # Of language modelling: the entropy of each prediction, and whether the label is the most probable token.
        asked = {"statistics": ("entropy", "top")} if names else {}
        inputs = [{**decoder_inputs(batch), **asked} for batch in batches]
        outputs = pipeline.forward_microbatches(rank_state.model, mesh, inputs)
        # Ranks without the head return no log-probs.
        for (source, _, _), batch, output in zip(group, batches, outputs):
            if mismatched is not None:
                batch = {**batch, "statistics": mismatched[source]}
            log_probs = output.log_probs if names else output
            batch_loss = objective.loss(log_probs.double(), batch, 1.0, segment_sums(mesh))
            losses[source] += batch_loss if adds_to_loss(objective, mesh) else 0.0
            if isinstance(objective, SequenceObjective):
                metrics[source].add(objective.measure(sequence_sums(log_probs, batch, segment_sums(mesh)), batch))
            elif names:
                trained = (batch["labels"] != IGNORED).sum()
                totals = torch.stack([part.sum(dtype=torch.float64) for part in (output.entropy, output.top)])
                metrics[source].add(torch.stack([totals, trained.expand(2)], 1))
    rank_state.model.train()
    reshard(rank_state.model)
    counts = torch.stack([losses, losses.new_tensor(units), losses.new_tensor(tokens)])
    measured = torch.stack([each.sums.flatten() for each in metrics], 1)
    sums = all_reduce_sum(torch.cat([counts, measured]), mesh)
    each = [_mean(column, metrics[0].names) for column in sums.T.tolist()]
    whole = _mean(sums.sum(1).tolist(), metrics[0].names)
    sources = dict(zip(source_names, each, strict=True)) if len(each) > 1 else {}
    return Evaluation(whole.loss, whole.tokens, whole.units, whole.metrics, sources)


def _read(rank_state: RankState, group: Sequence[tuple[int, int, int]]) -> tuple[list[Batch], list[dict[str, Tensor]]]:
    """Return the rows of the microbatches (source, first, stop) of `group`: whole rows, and this rank's part of the
    positions of each row."""
    assert rank_state.validation is not None
    size = rank_state.run.layout.microbatch
    rows = [rank_state.validation.batch(start, size, stop) for _, start, stop in group]
    return rows, prepare_batches(rank_state.model, rank_state.mesh, rank_state.objective, map(as_tensors, rows))


def _mismatched_statistics(
    rank_state: RankState, groups: Sequence[Sequence[tuple[int, int, int]]], sources: int
) -> Tensor:
    """Return the objective's statistics of the mismatched rows of each source, (sources, 2).

    A mismatched row has prompts with the replies to other prompts.
    """
    total = torch.zeros(sources, 2, dtype=torch.float64, device=rank_state.mesh.device)
    for group in groups:
        _, batches = _read(rank_state, group)
        for source in {source for source, _, _ in group}:
            own = [batch for batch, (other, _, _) in zip(batches, group, strict=True) if other == source]
            total[source] += mismatched_statistics(rank_state.model, rank_state.mesh, rank_state.objective, own)
    return all_reduce_sum(total, rank_state.mesh)


def _mean(sums: Sequence[float], names: Sequence[str]) -> Loss:
    """Return the means for `sums`: the sum of losses, of units and of tokens, then for each of the metrics `names` the
    sum and the number of its terms."""
    loss, units, tokens, *measured = sums
    return Loss(loss / (units or 1.0), int(tokens), units, means_of(measured, names))


def means_of(sums: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Return the metrics `names` by name, given the sum and the number of its terms for each; without terms, it is left
    out."""
    pairs = zip(sums[0::2], sums[1::2], strict=True)
    return {name: total / number for name, (total, number) in zip(names, pairs, strict=True) if number}
