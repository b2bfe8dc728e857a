"""A rollout batch: groups of replies with their log-probs, cut into the updates that train on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kumi.data.binfile import Array
from kumi.data.row_source import Batch
from kumi.rollout.group import Group
from kumi.rollout.prompt_sampler import Prompt
from kumi.rollout.rollout_rows import ReplySequence, fill_rows
from kumi.spec.balanced_rows import RowPlan, plan_rows


@dataclass(frozen=True)
class UpdateSettings:
    """How a rollout batch is trained on.

    updates: number of parts into which a batch is cut, with equally many groups; each part is one update.
    passes: how often the parts are trained, one after the other.
    mask_truncated: True if no update trains replies that were cut at their largest number of tokens. Their rewards
        still count in the advantages of the other replies of their group.
    """

    updates: int = 1
    passes: int = 1
    mask_truncated: bool = False

    @property
    def steps(self) -> int:
        """The number of updates of the weights with one batch."""
        return self.updates * self.passes


@dataclass(frozen=True)
class RowSettings:
    """The rows of an update, for `ranks` data-parallel ranks. A row has at most `longest` positions, and a multiple of
    `multiple`."""

    longest: int
    ranks: int
    multiple: int


# (sequences, the rows of each update) -> the log-prob of each reply token by a model of the run, or the value of each
# reply token by a critic, float64 (tokens,).
LogProbs = Callable[[Sequence[ReplySequence], Sequence[RowPlan]], Array]


@dataclass(frozen=True, eq=False)
class TokenTargets:
    """What the updates with a rollout batch train each reply token for, float64 (tokens,).

    advantages: for the policy. returns: for the critic, nan at tokens without a return; None in a run without a critic.
    """

    advantages: Array
    returns: Array | None = None


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """The groups that the weights after `version` updates train on, the same on all ranks.

    prompts: the prompt of each group. old, reference: log-probs of all reply tokens by the policy before its first
    update with this batch, and by the reference model, float64 (tokens,); None where the objective needs none. `old` is
    nan at the tokens of an update that needs no old log-probs.
    values: the critic's values of all reply tokens before the first update, float64 (tokens,); None without a critic.
    """

    version: int
    groups: Sequence[Group]
    prompts: Sequence[Prompt]
    settings: UpdateSettings
    rows: RowSettings
    old: Array | None = None
    reference: Array | None = None
    values: Array | None = None

    @cached_property
    def sequences(self) -> list[ReplySequence]:
        """All replies with their prompts, group by group."""
        sequences, first = [], 0
        for group, prompt in zip(self.groups, self.prompts, strict=True):
            for reply in group.replies:
                sequences.append(ReplySequence(prompt.ids, reply.ids, first))
                first += len(reply.ids)
        return sequences

    @cached_property
    def tokens(self) -> int:
        """Tokens of all replies."""
        return sum(len(reply.ids) for group in self.groups for reply in group.replies)

    @cached_property
    def sampler(self) -> Array:
        """The sampler's log-prob of each reply token, float64 (tokens,)."""
        return np.concatenate([reply.log_probs for group in self.groups for reply in group.replies])

    @cached_property
    def rewards(self) -> Array:
        """The reward of each reply, float64 (groups, replies); nan for one that cannot be scored."""
        return np.array([group.rewards for group in self.groups], np.float64)

    @cached_property
    def trained_sequences(self) -> list[list[int]]:
        """The indices in `sequences` of those that each update trains.

        Where all replies of an update are truncated, `mask_truncated` leaves none out, as a step needs tokens.
        """
        size, per_update = len(self.groups[0].replies), len(self.groups) // self.settings.updates
        replies = [reply for group in self.groups for reply in group.replies]
        result = []
        for begin in range(0, len(self.groups), per_update):
            indices = list(range(begin * size, (begin + per_update) * size))
            complete = [index for index in indices if not replies[index].truncated]
            result.append(complete if self.settings.mask_truncated and complete else indices)
        return result

    @cached_property
    def plans(self) -> list[RowPlan]:
        """The rows of each update, as indices in `sequences`."""
        plans = []
        for indices in self.trained_sequences:
            positions = [self.sequences[index].positions for index in indices]
            plan = plan_rows(positions, self.rows.longest, self.rows.ranks, self.rows.multiple)
            plans.append(RowPlan([[indices[place] for place in row] for row in plan.rows], plan.length))
        return plans

    def batch(self, update: int, rank: int, targets: TokenTargets) -> Batch:
        """Return the rows of data-parallel rank number `rank` for the part `update`, with the columns of the policy's
        loss and of a critic's."""
        columns = {"advantages": targets.advantages, "sampler_log_probs": self.sampler}
        optional = {
            "old_log_probs": self.old,
            "reference_log_probs": self.reference,
            "returns": targets.returns,
            "old_values": self.values,
        }
        columns |= {name: values for name, values in optional.items() if values is not None}
        if self.old is not None and np.isnan(self.old[self.token_places(update)]).any():
            del columns["old_log_probs"]  # nan: this update needs none
        plan = self.plans[update]
        return fill_rows(self.sequences, plan.rows[rank :: self.rows.ranks], plan.length, columns)

    def teaches(self, update: int, targets: TokenTargets) -> bool:
        """Return True if a token that the part `update` trains has an advantage other than 0."""
        return bool(np.any(targets.advantages[self.token_places(update)] != 0))

    def count_returns(self, update: int, targets: TokenTargets) -> int:
        """Return the number of tokens with a return, over all ranks, that the part `update` trains."""
        if targets.returns is None:
            return 0
        return int(np.isfinite(targets.returns[self.token_places(update)]).sum())

    def token_places(self, update: int) -> Array:
        """Return the places of the tokens that the part `update` trains, in arrays of all reply tokens."""
        trained = (self.sequences[index] for index in self.trained_sequences[update])
        return np.concatenate([np.arange(each.first, each.first + len(each.reply)) for each in trained])


def spread_over_tokens(values: Array, groups: Sequence[Group]) -> Array:
    """Return for each reply token the number that `values` (groups, replies) has for its reply, float64 (tokens,)."""
    lengths = [len(reply.ids) for group in groups for reply in group.replies]
    return np.repeat(np.asarray(values, np.float64).ravel(), lengths)
