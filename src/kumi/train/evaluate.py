"""The loss on held-out documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kumi.objectives import lm
from kumi.parallel import context, pipeline
from kumi.parallel.data import release
from kumi.parallel.mesh import total
from kumi.train.state import Parts
from kumi.train.step import to_device


@dataclass(frozen=True)
class Evaluation:
    """Mean negative log-probability of a held-out token, in nats, over `tokens` of them."""

    loss: float
    tokens: int


@torch.no_grad()
def evaluate(parts: Parts, *, first: int | None = None) -> Evaluation:
    """The loss on the run's held-out sequences, divided over the ranks; on the `first` of them only, where given."""
    assert parts.validation is not None
    layout, size = parts.run.layout, parts.run.layout.microbatch
    count = len(parts.validation) if first is None else first
    mesh, ahead = parts.mesh, 1 if layout.pp == 1 else 4 * layout.pp
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    parts.model.eval()
    # Every rank runs the same number of microbatches, since sharded parameters are gathered together; past the end
    # there is only padding.
    starts = [begin + layout.dp_index(mesh.rank) * size for begin in range(0, count, layout.dp * size)]
    for group in (starts[begin : begin + ahead] for begin in range(0, len(starts), ahead)):
        whole = [to_device(parts.validation.batch(mine, size), mesh.device) for mine in group]
        microbatches = [context.cut(inputs, mesh) for inputs in whole]
        found = pipeline.forward(parts.model, mesh, microbatches)
        # The ranks of a tensor-parallel group have the same log-probs, and those without the head have none.
        for inputs, log_probs in zip(microbatches, found) if mesh.index("tp") == 0 else ():
            sums += torch.stack([-log_probs.double().sum(), (inputs["labels"] != lm.IGNORED).sum()])
    parts.model.train()
    release(parts.model)
    loss, tokens = total(sums, mesh).tolist()
    return Evaluation(loss / max(tokens, 1), int(tokens))
