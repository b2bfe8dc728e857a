"""Score the replies of groups by the rewards of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kumi.inference.reply_text import reply_text
from kumi.rewards import RewardRequest, RewardScorer, Unscored
from kumi.rewards.reward_spec import ModelReward
from kumi.rollout.group import GeneratedReply
from kumi.rollout.prompt_sampler import Prompt
from kumi.rollout.reward_models import ModelScores

_FAULTS = {
    "timeouts": "{} replies took too long",
    "exceptions": "{} replies raised an exception",
    "missing": "{} replies whose row lacks a column",
}


class GivenScores:
    """Answers a `RewardScorer` with the scores of reward models that all ranks have computed before."""

    def __init__(self) -> None:
        self.scores: ModelScores = {}

    def __call__(self, spec: ModelReward, requests: Sequence[RewardRequest]) -> Sequence[float | Unscored]:
        """Return the scores of the replies of `requests`."""
        return self.scores[spec.name]


class ReplyScorer:
    """Scores replies with `rewards`; a `kumi.rollout.collect_groups.GroupScorer`.

    given: has the scores of reward models for `rewards`.
    decode: returns the text of token ids, special tokens included. decode_reply: the text without them.
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
    ) -> list[tuple[list[float], list[Mapping[str, float | None]]]]:
        """Return, for each of `prompts`, the rewards of its `replies` (nan for None) and their parts by function."""
        self._given.scores = scores
        requests = [
            self._request(prompt, self._decode(prompt.ids), reply)
            for prompt, own in zip(prompts, replies, strict=True)
            for reply in own
        ]
        results = iter(self._rewards.score(requests))
        scored = []
        for own in replies:
            of_group = [next(results) for _ in own]
            totals = [math.nan if result.total is None else float(result.total) for result in of_group]
            scored.append((totals, [result.parts for result in of_group]))
        return scored

    def notes(self) -> list[str]:
        """Return a sentence for each kind of fault of a reward that has occurred since the last call."""
        sentences = []
        for name, faults in self._rewards.faults.items():
            for kind in ("timeouts", "exceptions", "missing"):
                count = getattr(faults, kind)
                if count > self._noted.get((name, kind), 0):
                    example = getattr(faults, f"{kind.removesuffix('s') if kind != 'missing' else kind}_example")
                    sentences.append(
                        f"reward {name}: {_FAULTS[kind].format(count)} since the start, such as: {example}"
                    )
                self._noted[name, kind] = count
        return sentences

    def _request(self, prompt: Prompt, text: str, reply: GeneratedReply) -> RewardRequest:
        answer = reply_text(self._decode_reply, prompt.ids, reply.ids.tolist())
        return RewardRequest(text, answer, prompt.row, len(reply.ids), reply.truncated)


class NoRewards:
    """Scores no reply, for objectives whose advantages come from elsewhere."""

    def score(
        self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]], scores: ModelScores
    ) -> list[tuple[list[float], list[Mapping[str, float | None]]]]:
        """Return nan as the reward of each reply."""
        return [([math.nan] * len(own), [{}] * len(own)) for own in replies]

    def notes(self) -> list[str]:
        """Return nothing: there are no faults."""
        return []
