"""Score replies with reward models that lie on the layout of the run, on all ranks together.

Rank 0 makes the sequences, because a template may take too long on one rank and not on another. All sequences of a call
are packed into rows of about equal length, a share for each data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from kumi.data.binfile import Array
from kumi.data.row_source import Batch, padding_rows
from kumi.objectives import OBJECTIVES
from kumi.parallel import pipeline
from kumi.parallel.mesh import Mesh, all_reduce_sum, broadcast_object, is_loss_rank
from kumi.parallel.run_microbatches import decoder_inputs, evaluating, shard_batch
from kumi.rewards import Unscored
from kumi.rollout.group import GeneratedReply
from kumi.rollout.prompt_sampler import Prompt
from kumi.rollout.reward_sequences import Sequences
from kumi.rollout.rollout_batch import RowSettings
from kumi.spec.balanced_rows import plan_rows

# The score of each reply by name of the reward, group by group.
ModelScores = Mapping[str, Sequence[float | Unscored]]


@dataclass(frozen=True)
class RewardModel:
    """A reward model of the run: `model` is a result of `kumi.parallel.build`, `sequences` says what it reads."""

    name: str
    model: nn.Module
    sequences: Sequences


@dataclass(frozen=True)
class RewardModels:
    """The reward models of a run on `mesh`.

    identities: by name, the folder and the digest of each as it was loaded, for checkpoints.
    rows, microbatch: rows of a pass of a rank, as in training. reply_text: (ids of a prompt, ids of a reply) -> text.
    """

    models: Sequence[RewardModel]
    identities: Mapping[str, Mapping[str, str]]
    mesh: Mesh
    rows: RowSettings
    microbatch: int
    reply_text: Callable[[Sequence[int], Sequence[int]], str]

    def score(self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]]) -> ModelScores:
        """Return the scores of the `replies` to each of `prompts`, the same on all ranks. Every rank calls this."""
        made = self._sequences(prompts, replies) if self.mesh.rank == 0 else {}
        result = {}
        for scorer in self.models:
            sequences = broadcast_object(made.get(scorer.name, []), self.mesh)
            readable = [ids for ids in sequences if not isinstance(ids, Unscored)]
            scores = iter(sequence_scores(scorer.model, self.mesh, self.rows, self.microbatch, readable).tolist())
            result[scorer.name] = [ids if isinstance(ids, Unscored) else next(scores) for ids in sequences]
        return result

    def _sequences(
        self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]]
    ) -> dict[str, list[list[int] | Unscored]]:
        """Return what each reward model reads of each reply."""
        result: dict[str, list[list[int] | Unscored]] = {scorer.name: [] for scorer in self.models}
        for prompt, own in zip(prompts, replies, strict=True):
            for reply in own:
                text = self.reply_text(prompt.ids, reply.ids.tolist())
                for scorer in self.models:
                    result[scorer.name].append(scorer.sequences.sequence(prompt, reply, text))
        return result


@torch.no_grad()
def sequence_scores(
    model: nn.Module, mesh: Mesh, rows: RowSettings, microbatch: int, sequences: Sequence[Sequence[int]]
) -> Array:
    """Return the score of the last token of each of `sequences` by `model`, float64 (n,), the same on all ranks.

    A row has `rows.longest` tokens, or those of a longer sequence. Every rank calls this with the same sequences.
    """
    total = np.zeros(len(sequences))
    if not sequences:
        return total
    lengths = [len(ids) for ids in sequences]
    plan = plan_rows(lengths, max(rows.longest, *lengths), rows.ranks, rows.multiple)
    own = plan.rows[mesh.layout.dp_index(mesh.rank) :: mesh.layout.dp]
    objective = OBJECTIVES["lm"]()
    with evaluating(model):
        for start in range(0, len(own), microbatch):
            part = own[start : start + microbatch]
            batch = {name: torch.from_numpy(column) for name, column in _fill(sequences, part, plan.length).items()}
            inputs = decoder_inputs(shard_batch(objective, batch, mesh))
            [scores] = pipeline.forward_microbatches(model, mesh, [inputs])
            if is_loss_rank(mesh):
                _read_back(sequences, part, scores.double().cpu().numpy(), total)
    return np.asarray(all_reduce_sum(torch.from_numpy(total).to(mesh.device), mesh).cpu().numpy())


def _fill(sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], length: int) -> Batch:
    """Return the batch of `rows`; the only labels that are not ignored are those of last tokens."""
    batch = padding_rows(len(rows), length)
    for at, row in enumerate(rows):
        start = 0
        for number, ids in enumerate(sequences[index] for index in row):
            stop = start + len(ids)
            batch["input_ids"][at, start:stop] = ids
            batch["position_ids"][at, start:stop] = np.arange(len(ids))
            batch["document_ids"][at, start:stop] = number
            batch["labels"][at, stop - 1] = 0
            start = stop
        # Padding is one more document.
        batch["document_ids"][at, start:] = len(row)
        batch["position_ids"][at, start:] = np.arange(length - start)
    return batch


def _read_back(sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], scores: Array, out: Array) -> None:
    """Write the score of the last token of each sequence of `rows`, of `scores` (B, S), to its place in `out`."""
    for at, row in enumerate(rows):
        stop = 0
        for index in row:
            stop += len(sequences[index])
            out[index] = scores[at, stop - 1]
