"""Collect the groups of a batch. A group is the replies to one prompt, with their rewards.

    round: the next prompts -> replies of the engine -> outcomes of the environment -> groups

The journal has the replies and outcomes of an earlier attempt at the batch, which are not asked for again.
A batch needs one round. With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2), groups whose replies all have the
same reward are dropped, and further rounds draw more prompts until enough groups remain, or until `max_rounds`. All
ranks have the same groups, and decide alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kumi.inference.sampling import Sampling
from kumi.parallel.mesh import Mesh, gather_objects, is_loss_rank
from kumi.rollout.environment import Environment
from kumi.rollout.group import GeneratedReply, Group
from kumi.rollout.prompt_sampler import Prompt, PromptSampler
from kumi.rollout.reply_journal import ReplyJournal
from kumi.rollout.rollout_engine import Engine, SampleRequest

# The most prompts that a round after the first asks for, as a multiple of a batch's prompts. The share of groups that
# remain is estimated from few prompts, and too low an estimate must not make a round huge.
_LARGEST_ROUND = 4


@dataclass(frozen=True)
class CollectSettings:
    """How batches are collected.

    prompts: number of prompts of a batch, each with one group. group_size: number of replies of a group.
    dynamic: True if groups of equal rewards are dropped, and more prompts are drawn instead.
    max_rounds: the largest number of rounds of a batch.
    chunk: number of replies that are generated in one call of the engine, and recorded together.
    """

    prompts: int
    group_size: int
    sampling: Sampling
    chunk: int
    dynamic: bool = False
    max_rounds: int = 1


@dataclass(frozen=True)
class Collected:
    """A batch.

    groups: the groups to train on. spares: further groups with different rewards, for the next batch.
    dropped: groups of equal rewards that are not trained on.
    next_prompt: the number of the first prompt that was not drawn.
    rounds: number of rounds.
    generate_s, score_s: seconds that this rank spent on generation and on scoring.
    generated: number of reply tokens of all ranks that were generated, not read from the journal.
    notes: sentences for the user, on rank 0.
    """

    groups: list[Group]
    spares: list[Group]
    dropped: list[Group]
    next_prompt: int
    rounds: int
    generate_s: float
    score_s: float
    generated: int
    notes: Sequence[str] = ()


@dataclass
class _Totals:
    """Sums over the rounds of a batch: `Collected.generate_s`, `score_s` and `generated`."""

    generate_s: float = 0.0
    score_s: float = 0.0
    generated: int = 0


@dataclass
class GroupCollector:
    """Collects batches on all ranks of `mesh`, which make the same calls.

    folder: the folder of journals. digest: a digest of the settings that replies and scores of reward models depend on.
    """

    sampler: PromptSampler
    engine: Engine
    environment: Environment
    mesh: Mesh
    settings: CollectSettings
    folder: Path
    digest: str
    _totals: _Totals = field(default_factory=_Totals)

    def collect(self, version: int, first: int, spares: Sequence[Group]) -> Collected:
        """Return the batch that the weights after `version` updates generate, from prompt number `first` on.

        spares: those of the batch before, which become the first groups of this one.
        """
        self._totals = totals = _Totals()
        self.engine.update(version)
        journal = ReplyJournal(self.folder, version, self.digest, self.mesh)
        try:
            usable, dropped = list(spares), list[Group]()
            count, rounds, drawn = self.settings.prompts, 0, 0
            while len(usable) < count and rounds < self.settings.max_rounds:
                size = _round_size(count - len(usable), drawn, len(usable) - len(spares), count)
                for group in self._groups(list(self.sampler.prompts(first, size)), journal):
                    (usable if group.differs or not self.settings.dynamic else dropped).append(group)
                first, drawn, rounds = first + size, drawn + size, rounds + 1
        finally:
            journal.close()
        # If the last round leaves a batch too small, the latest dropped groups fill it up, as without dynamic sampling.
        filling = dropped[max(0, len(dropped) - max(0, count - len(usable))) :]
        groups = [*usable[:count], *filling]
        rest = dropped[: len(dropped) - len(filling)]
        counts = (first, rounds, totals.generate_s, totals.score_s, totals.generated)
        return Collected(groups, usable[count:], rest, *counts, self.environment.notes())

    def _groups(self, prompts: Sequence[Prompt], journal: ReplyJournal) -> list[Group]:
        """Return the groups of `prompts`, with replies and outcomes of the journal where it has them."""
        started = time.perf_counter()
        self._generate(prompts, journal)
        generated = time.perf_counter()
        replies = [
            tuple(journal.replies[prompt.number, sample] for sample in range(self.settings.group_size))
            for prompt in prompts
        ]
        self._score(prompts, replies, journal)
        self._totals.generate_s += generated - started
        self._totals.score_s += time.perf_counter() - generated
        return [
            Group(prompt.number, of_prompt, journal.outcomes[prompt.number])
            for prompt, of_prompt in zip(prompts, replies, strict=True)
        ]

    def _generate(self, prompts: Sequence[Prompt], journal: ReplyJournal) -> None:
        """Generate the replies to `prompts` that the journal lacks, and add them to it on all ranks."""
        size = self.settings.group_size
        requests = [
            SampleRequest(prompt.number, sample, prompt.ids, prompt.number * size + sample)
            for prompt in prompts
            for sample in range(size)
            if (prompt.number, sample) not in journal.replies
        ]
        for start in range(0, len(requests), self.settings.chunk):
            chunk = requests[start : start + self.settings.chunk]
            own = [
                (request.prompt, request.sample, reply)
                for request, reply in self.engine.generate(chunk, self.settings.sampling)
            ]
            # The ranks of a tp group have generated the same replies, so that one of them gives its own.
            parts = gather_objects(own if is_loss_rank(self.mesh) else [], self.mesh)
            replies = {(number, sample): reply for part in parts for number, sample, reply in part}
            journal.add_replies(
                {(request.prompt, request.sample): replies[request.prompt, request.sample] for request in chunk}
            )
            self._totals.generated += sum(len(reply.ids) for reply in replies.values())

    def _score(
        self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]], journal: ReplyJournal
    ) -> None:
        """Ask the environment for the outcomes that the journal lacks, and add them to it on all ranks."""
        missing = [index for index, prompt in enumerate(prompts) if prompt.number not in journal.outcomes]
        if missing:
            asked = [prompts[index] for index in missing]
            outcomes = self.environment.outcomes(asked, [replies[index] for index in missing])
            journal.add_outcomes(dict(zip((prompt.number for prompt in asked), outcomes, strict=True)))


def _round_size(missing: int, drawn: int, usable: int, prompts: int) -> int:
    """Return the number of prompts that a round asks for: as many as will probably give the `missing` groups.

    drawn: number of prompts of the earlier rounds. usable: number of these whose groups are not dropped.
    prompts: number of prompts of a batch.
    """
    if not drawn:
        return missing
    # Where no group was usable so far, half of one is assumed, so that the share is above 0.
    share = max(usable, 0.5) / drawn
    return max(1, min(round(missing / share), _LARGEST_ROUND * prompts))
