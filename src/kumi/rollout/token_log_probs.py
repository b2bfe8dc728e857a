"""Forward passes over replies: log-probs of their tokens by the policy before its updates ("old") or by the reference
model, and a critic's values of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from kumi.data.binfile import Array
from kumi.nn.temperature import at_temperature
from kumi.objectives import OBJECTIVES
from kumi.parallel import pipeline
from kumi.parallel.mesh import Mesh, all_reduce_sum, is_loss_rank
from kumi.parallel.run_microbatches import decoder_inputs, evaluating, shard_batch
from kumi.rollout.rollout_rows import ReplySequence, fill_rows, read_rows_back
from kumi.spec.balanced_rows import RowPlan


@dataclass(frozen=True)
class PassSettings:
    """The passes of training: `microbatch` rows at a time, log-probs at `temperature`."""

    microbatch: int
    temperature: float = 1.0


@torch.no_grad()
def reply_log_probs(
    model: nn.Module, mesh: Mesh, settings: PassSettings, sequences: Sequence[ReplySequence], plans: Sequence[RowPlan]
) -> Array:
    """Return the log-prob of each reply token by `model`, float64 (tokens,), the same on all ranks.

    For a critic, whose head gives scores, return the score of the state before each token: its value.

    plans: the rows of each update; replies in none of them have log-probs of 0. Every rank calls this. The passes are
    those of training, over the same rows, so that equal weights give equal log-probs.
    """
    total = np.zeros(max(sequence.first + len(sequence.reply) for sequence in sequences))
    # `shard_batch` needs an objective, but the batch has no columns that only an objective reads.
    objective, microbatch = OBJECTIVES["lm"](), settings.microbatch
    with evaluating(model), at_temperature(model, settings.temperature):
        for plan in plans:
            own = own_rows(plan, mesh)
            batch = fill_rows(sequences, own, plan.length, {})
            for start in range(0, len(own), microbatch):
                part = {name: torch.from_numpy(column[start : start + microbatch]) for name, column in batch.items()}
                inputs = decoder_inputs(shard_batch(objective, part, mesh))
                [log_probs] = pipeline.forward_microbatches(model, mesh, [inputs])
                if is_loss_rank(mesh):
                    values = log_probs.double().cpu().numpy()
                    read_rows_back(sequences, own[start : start + microbatch], values, total)
    summed = all_reduce_sum(torch.from_numpy(total).to(mesh.device), mesh)
    return np.asarray(summed.cpu().numpy())


def own_rows(plan: RowPlan, mesh: Mesh) -> Sequence[Sequence[int]]:
    """Return the rows of `plan` that this data-parallel rank computes."""
    return plan.rows[mesh.layout.dp_index(mesh.rank) :: mesh.layout.dp]
