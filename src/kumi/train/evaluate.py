"""The loss on held-out documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kumi.parallel import pipeline
from kumi.parallel.data_parallel import release
from kumi.parallel.mesh import counts_once, total
from kumi.parallel.run_microbatches import counts_loss, cut, decoder_inputs, segment_sums
from kumi.train.step import to_device
from kumi.train.train_state import Parts


@dataclass(frozen=True)
class Evaluation:
    """The mean loss of a held-out unit, for language modelling a token, in nats, over `tokens` of them."""

    loss: float
    tokens: int


@torch.no_grad()
def evaluate(parts: Parts, *, first: int | None = None) -> Evaluation:
    """The loss on the run's held-out sequences, divided over the ranks; on the `first` of them only, where given."""
    assert parts.validation is not None
    layout, size = parts.run.layout, parts.run.layout.microbatch
    count = len(parts.validation) if first is None else first
    mesh, ahead = parts.mesh, 1 if layout.pp == 1 else 4 * layout.pp
    loss, counted, objective = torch.zeros((), dtype=torch.float64, device=mesh.device), 0, parts.objective
    parts.model.eval()
    # Every rank runs the same number of microbatches, since sharded parameters are gathered together; past the end
    # there is only padding.
    starts = [begin + layout.dp_index(mesh.rank) * size for begin in range(0, count, layout.dp * size)]
    for group in (starts[begin : begin + ahead] for begin in range(0, len(starts), ahead)):
        whole = [parts.validation.batch(mine, size) for mine in group]
        counted += sum(map(objective.count, whole)) if counts_once(mesh) else 0
        batches = [cut(objective, to_device(batch, mesh.device), mesh) for batch in whole]
        found = pipeline.forward(parts.model, mesh, list(map(decoder_inputs, batches)))
        # Ranks without the head have no log-probs.
        for batch, log_probs in zip(batches, found):
            one = objective.loss(log_probs.double(), batch, 1.0, segment_sums(mesh))
            loss += one if counts_loss(objective, mesh) else 0.0
    parts.model.train()
    release(parts.model)
    of_all, units = total(torch.stack([loss, loss.new_tensor(counted)]), mesh).tolist()
    return Evaluation(of_all / max(units, 1), int(units))
