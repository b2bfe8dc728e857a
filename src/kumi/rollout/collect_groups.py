"""Collect the groups of a batch: prompts in their order, replies, rewards, and more prompts where groups teach nothing.

    round: the next prompts -> replies of the engine -> outcomes of the environment -> groups

The journal has the replies and outcomes of an earlier attempt at the batch, which are not asked for again.
A batch needs one round, or with dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) as many as it takes until enough
groups have different rewards. All ranks have the same groups, and decide alike.
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

# The most prompts that a further round asks for, in batches: the share of groups that differ is uncertain.
_LARGEST_ROUND = 4


@dataclass(frozen=True)
class CollectSettings:
    """How batches are collected.

    prompts: groups of a batch. group_size: replies of a group.
    dynamic: groups of equal rewards are dropped, and more prompts are drawn instead.
    max_rounds: the largest number of rounds of a batch.
    chunk: replies that are generated in one call of the engine, and recorded together.
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

    groups: those to train on. spares: further groups that differ, for the next batch. dropped: groups of equal rewards.
    next_prompt: the number of the first prompt that was not drawn.
    rounds: number of rounds.
    generate_s, score_s: seconds of this rank. generated: tokens of replies that were generated, not read.
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
class _Seconds:
    generate: float = 0.0
    score: float = 0.0
    tokens: int = 0


@dataclass
class GroupCollector:
    """Collects batches on all ranks of `mesh`, which make the same calls.

    folder: for journals. digest: of the settings that replies and scores of reward models depend on.
    """

    sampler: PromptSampler
    engine: Engine
    environment: Environment
    mesh: Mesh
    settings: CollectSettings
    folder: Path
    digest: str
    _seconds: _Seconds = field(default_factory=_Seconds)

    def collect(self, version: int, first: int, spares: Sequence[Group]) -> Collected:
        """Return the batch that the weights after `version` updates generate, from prompt number `first` on.

        spares: groups of the batch before, which come first.
        """
        self._seconds = seconds = _Seconds()
        self.engine.update(version)
        journal = ReplyJournal(self.folder, version, self.digest, self.mesh)
        try:
            usable, dropped = list(spares), list[Group]()
            count, rounds, drawn = self.settings.prompts, 0, 0
            while len(usable) < count and rounds < self.settings.max_rounds:
                number = _round_size(count - len(usable), drawn, len(usable) - len(spares), count)
                for group in self._groups(list(self.sampler.prompts(first, number)), journal):
                    (usable if group.differs or not self.settings.dynamic else dropped).append(group)
                first, drawn, rounds = first + number, drawn + number, rounds + 1
        finally:
            journal.close()
        # After the last round, groups that teach nothing fill the batch up: it trains as it would without this rule.
        filling = dropped[max(0, len(dropped) - max(0, count - len(usable))) :]
        groups = [*usable[:count], *filling]
        rest = dropped[: len(dropped) - len(filling)]
        counts = (first, rounds, seconds.generate, seconds.score, seconds.tokens)
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
        self._seconds.generate += generated - started
        self._seconds.score += time.perf_counter() - generated
        return [
            Group(prompt.number, own, journal.outcomes[prompt.number])
            for prompt, own in zip(prompts, replies, strict=True)
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
            # Ranks of tp have generated the same replies.
            parts = gather_objects(own if is_loss_rank(self.mesh) else [], self.mesh)
            replies = {(number, sample): reply for part in parts for number, sample, reply in part}
            journal.add_replies(
                {(request.prompt, request.sample): replies[request.prompt, request.sample] for request in chunk}
            )
            self._seconds.tokens += sum(len(reply.ids) for reply in replies.values())

    def _score(
        self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]], journal: ReplyJournal
    ) -> None:
        """Ask the environment for the outcomes that the journal lacks, and add them to it on all ranks."""
        missing = [number for number, prompt in enumerate(prompts) if prompt.number not in journal.outcomes]
        if missing:
            asked = [prompts[number] for number in missing]
            outcomes = self.environment.outcomes(asked, [replies[number] for number in missing])
            journal.add_outcomes(dict(zip((prompt.number for prompt in asked), outcomes, strict=True)))


def _round_size(missing: int, drawn: int, usable: int, prompts: int) -> int:
    """Return the prompts that a round asks for: as many as probably give the `missing` groups.

    drawn, usable: prompts of the earlier rounds, and those of them whose groups can be used. prompts: of a batch.
    """
    if not drawn:
        return missing
    share = max(usable, 0.5) / drawn
    return max(1, min(round(missing / share), _LARGEST_ROUND * prompts))
