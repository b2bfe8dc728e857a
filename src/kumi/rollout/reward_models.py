"""Score replies with reward models that have the layout of the run, on all ranks together.

Rank 0 alone makes the sequences, because a chat template may exceed its time limit on one rank and not on another. All
sequences of a call are packed into rows of about equal length, and each data-parallel rank computes its share of rows.
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

# The name of a reward -> the score of each reply, group by group, or the reason why it has none.
ModelScores = Mapping[str, Sequence[float | Unscored]]


@dataclass(frozen=True)
class RewardModel:
    """A reward model: `model`, a result of `kumi.parallel.build`, reads the tokens that `sequences` makes."""

    name: str
    model: nn.Module
    sequences: Sequences


@dataclass(frozen=True)
class RewardModels:
    """The reward models of a run on `mesh`.

    identities: the folder and the digest of each model as it was loaded, by its name; checkpoints record them.
    rows: the length of rows. microbatch: number of rows of a rank in one forward pass, as in training.
    reply_text: (ids of a prompt, ids of a reply) -> the text of the reply.
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
        """Return, by the name of each reward model, the tokens that it reads for each reply, or why it cannot."""
        result: dict[str, list[list[int] | Unscored]] = {scorer.name: [] for scorer in self.models}
        for prompt, of_prompt in zip(prompts, replies, strict=True):
            for reply in of_prompt:
                text = self.reply_text(prompt.ids, reply.ids.tolist())
                for scorer in self.models:
                    result[scorer.name].append(scorer.sequences.sequence(prompt, reply, text))
        return result


@torch.no_grad()
def sequence_scores(
    model: nn.Module, mesh: Mesh, rows: RowSettings, microbatch: int, sequences: Sequence[Sequence[int]]
) -> Array:
    """Return the score of the last token of each of `sequences` by `model`, float64 (n,), the same on all ranks.

    A row has at most `rows.longest` tokens, or as many as the longest sequence if that has more. Every rank calls this
    with the same sequences.
    """
    own_scores = np.zeros(len(sequences))  # 0 for sequences that other ranks score: the sum over ranks is the result
    if not sequences:
        return own_scores
    lengths = [len(ids) for ids in sequences]
    plan = plan_rows(lengths, max(rows.longest, *lengths), rows.ranks, rows.multiple)
    own = plan.rows[mesh.layout.dp_index(mesh.rank) :: mesh.layout.dp]
    objective = OBJECTIVES["lm"]()  # for `shard_batch`: the batch has no columns that only an objective reads
    with evaluating(model):
        for start in range(0, len(own), microbatch):
            part = own[start : start + microbatch]
            batch = {name: torch.from_numpy(column) for name, column in _fill(sequences, part, plan.length).items()}
            inputs = decoder_inputs(shard_batch(objective, batch, mesh))
            [scores] = pipeline.forward_microbatches(model, mesh, [inputs])
            if is_loss_rank(mesh):
                _read_back(sequences, part, scores.double().cpu().numpy(), own_scores)
    return np.asarray(all_reduce_sum(torch.from_numpy(own_scores).to(mesh.device), mesh).cpu().numpy())


def _fill(sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], length: int) -> Batch:
    """Return the batch of `rows`, lists of indices in `sequences`. Only the last token of a sequence has a label."""
    batch = padding_rows(len(rows), length)
    for at, row in enumerate(rows):
        start = 0
        for document, ids in enumerate(sequences[index] for index in row):
            stop = start + len(ids)
            batch["input_ids"][at, start:stop] = ids
            batch["position_ids"][at, start:stop] = np.arange(len(ids))
            batch["document_ids"][at, start:stop] = document
            batch["labels"][at, stop - 1] = 0
            start = stop
        # Padding is one more document.
        batch["document_ids"][at, start:] = len(row)
        batch["position_ids"][at, start:] = np.arange(length - start)
    return batch


def _read_back(sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], scores: Array, out: Array) -> None:
    """Copy the score of each sequence of `rows` from its last token in `scores` (B, S) to its index in `out` (n,)."""
    for at, row in enumerate(rows):
        stop = 0
        for index in row:
            stop += len(sequences[index])
            out[index] = scores[at, stop - 1]
