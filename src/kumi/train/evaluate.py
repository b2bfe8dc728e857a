"""The loss on held-out documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kumi.objectives import IGNORED
from kumi.parallel import pipeline
from kumi.parallel.data_parallel import reshard
from kumi.parallel.mesh import all_reduce_sum, is_loss_rank
from kumi.parallel.run_microbatches import adds_to_loss, decoder_inputs, segment_sums, shard_batch
from kumi.train.step import to_device
from kumi.train.train_state import RankState


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    An objective averages its loss over units, which are tokens for language modelling.
    """

    loss: float  # mean per held-out unit, in nats
    tokens: int  # held-out tokens with a label


@torch.no_grad()
def evaluate(rank_state: RankState, *, first: int | None = None) -> Evaluation:
    """Return the loss on the run's held-out sequences, or on the first `first` of them.

    Each data-parallel rank computes some of the sequences; the loss and the count are of all of them.
    """
    assert rank_state.validation is not None
    layout, size = rank_state.run.layout, rank_state.run.layout.microbatch
    count = len(rank_state.validation) if first is None else first
    # The stages of a pipeline work at the same time on the microbatches of one call.
    mesh, per_call = rank_state.mesh, 1 if layout.pp == 1 else 4 * layout.pp
    loss, objective = torch.zeros((), dtype=torch.float64, device=mesh.device), rank_state.objective
    counted, tokens = 0.0, 0
    rank_state.model.eval()
    # Every rank runs the same number of microbatches, because all ranks all-gather sharded parameters together.
    # Sequences past the end are padding.
    starts = [begin + layout.dp_index(mesh.rank) * size for begin in range(0, count, layout.dp * size)]
    for group in (starts[begin : begin + per_call] for begin in range(0, len(starts), per_call)):
        full_batches = [rank_state.validation.batch(start, size) for start in group]
        if is_loss_rank(mesh):
            counted += sum(map(objective.count, full_batches))
            tokens += sum(int((batch["labels"] != IGNORED).sum()) for batch in full_batches)
        batches = [shard_batch(objective, to_device(batch, mesh.device), mesh) for batch in full_batches]
        outputs = pipeline.forward_microbatches(rank_state.model, mesh, list(map(decoder_inputs, batches)))
        # Ranks without the head return no log-probs.
        for batch, log_probs in zip(batches, outputs):
            batch_loss = objective.loss(log_probs.double(), batch, 1.0, segment_sums(mesh))
            loss += batch_loss if adds_to_loss(objective, mesh) else 0.0
    rank_state.model.train()
    reshard(rank_state.model)
    sums = torch.stack([loss, loss.new_tensor(counted), loss.new_tensor(tokens)])
    loss_sum, units, labels = all_reduce_sum(sums, mesh).tolist()
    return Evaluation(loss_sum / (units or 1.0), int(labels))
