"""The environments of a run: replies are scored by its rewards, or not at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kumi.inference.reply_text import reply_text
from kumi.parallel.mesh import Mesh, broadcast_object
from kumi.rewards import RewardRequest, RewardResult, RewardScorer, Unscored
from kumi.rewards.reward_spec import ModelReward
from kumi.rollout.group import GeneratedReply, Outcome
from kumi.rollout.prompt_sampler import Prompt
from kumi.rollout.reward_models import ModelScores, RewardModels

# The kind of a fault, a field of `RewardFaults` -> the sentence about it.
_FAULTS = {
    "timeouts": "{} replies took too long",
    "exceptions": "{} replies raised an exception",
    "missing": "{} replies whose row lacks a column",
}


class GivenScores:
    """The `score_model` of a `RewardScorer`: returns the scores of reward models, which all ranks computed before."""

    def __init__(self) -> None:
        self.scores: ModelScores = {}

    def __call__(self, spec: ModelReward, requests: Sequence[RewardRequest]) -> Sequence[float | Unscored]:
        """Return the scores of the replies of `requests`."""
        return self.scores[spec.name]


class ReplyScorer:
    """Scores replies with `rewards`, on rank 0.

    given: the `score_model` of `rewards`.
    decode: returns the text of token ids with special tokens. decode_reply: returns the text without special tokens.
    """

    def __init__(
        self,
        rewards: RewardScorer,
        given: GivenScores,
        decode: Callable[[Sequence[int]], str],
        decode_reply: Callable[[Sequence[int]], str],
    ) -> None:
        self._rewards, self._given, self._decode, self._decode_reply = rewards, given, decode, decode_reply
        self._noted: dict[tuple[str, str], int] = {}

    def score(
        self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]], scores: ModelScores
    ) -> list[tuple[Outcome, ...]]:
        """Return, for each of `prompts`, the outcomes of its `replies`.

        scores: the scores of reward models, which all ranks have computed together.
        """
        self._given.scores = scores
        requests = [
            self._request(prompt, self._decode(prompt.ids), reply)
            for prompt, of_prompt in zip(prompts, replies, strict=True)
            for reply in of_prompt
        ]
        results = iter(self._rewards.score(requests))
        return [tuple(_outcome(next(results)) for _ in of_prompt) for of_prompt in replies]

    def notes(self) -> list[str]:
        """Return a sentence for each kind of fault of a reward that has occurred since the last call."""
        sentences = []
        for name, faults in self._rewards.faults.items():
            for kind in ("timeouts", "exceptions", "missing"):
                count = getattr(faults, kind)
                if count > self._noted.get((name, kind), 0):
                    example = getattr(faults, f"{kind.removesuffix('s')}_example")
                    sentences.append(
                        f"reward {name}: {_FAULTS[kind].format(count)} since the start, such as: {example}"
                    )
                self._noted[name, kind] = count
        return sentences

    def _request(self, prompt: Prompt, text: str, reply: GeneratedReply) -> RewardRequest:
        answer = reply_text(self._decode_reply, prompt.ids, reply.ids.tolist())
        return RewardRequest(text, answer, prompt.row, len(reply.ids), reply.truncated)


def _outcome(result: RewardResult) -> Outcome:
    return Outcome(math.nan if result.total is None else float(result.total), result.parts)


class ScoredReplies:
    """The environment in which rewards score replies; a `kumi.rollout.environment.Environment`.

    scorer: the scorer on rank 0; None on other ranks. models: the reward models of the run on all ranks, if it has any.
    """

    def __init__(self, scorer: ReplyScorer | None, models: RewardModels | None, mesh: Mesh) -> None:
        self._scorer, self._models, self._mesh = scorer, models, mesh

    def outcomes(
        self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]]
    ) -> list[tuple[Outcome, ...]]:
        """Return the outcomes of `replies`, on all ranks.

        All ranks compute the scores of reward models; then rank 0 computes all rewards, and sends them to all ranks.
        """
        scores = {} if self._models is None else self._models.score(prompts, replies)
        scored = [] if self._scorer is None else self._scorer.score(prompts, replies, scores)
        return broadcast_object(scored, self._mesh)

    def notes(self) -> list[str]:
        """Return a sentence for each kind of fault of a reward, on rank 0."""
        return [] if self._scorer is None else self._scorer.notes()


class UnscoredReplies:
    """The environment of objectives whose advantages need no rewards; a `kumi.rollout.environment.Environment`."""

    def outcomes(
        self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]]
    ) -> list[tuple[Outcome, ...]]:
        """Return outcomes without a reward."""
        return [tuple(Outcome(math.nan, {}) for _ in of_prompt) for of_prompt in replies]

    def notes(self) -> list[str]:
        """Return an empty list: there are no faults."""
        return []
