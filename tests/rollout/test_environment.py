"""Environments: rewards score replies, alone and with reward models, and a run without rewards scores none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from kumi.parallel.mesh import Mesh, RankInfo
from kumi.rewards import RewardScorer, Unscored, spec_from
from kumi.rollout.group import GeneratedReply
from kumi.rollout.prompt_sampler import Prompt
from kumi.rollout.score_replies import GivenScores, ReplyScorer, ScoredReplies, UnscoredReplies
from kumi.spec.layout import Layout

MESH = Mesh(Layout(), RankInfo(0, 1, 0, torch.device("cpu")), {})
PROMPTS = [Prompt(number, [1, 2], {"answer": "ab"}, "source", number) for number in (4, 5)]
QUALITY = {"kind": "model", "name": "quality", "source": "rm", "weight": 0.5}
EXACT = {"kind": "exact", "name": "exact"}


def reply(text, finish="stop"):
    """A reply whose tokens are the bytes of `text`."""
    return GeneratedReply(np.frombuffer(text.encode(), np.uint8).astype(np.int32), np.zeros(len(text)), finish, 0)


def decode(ids):
    return bytes(ids).decode()


class Models:
    """Reward models that give a reply the number of its tokens, and cannot read an empty text."""

    def score(self, prompts, replies):
        scores = [float(len(own.ids)) if len(own.ids) < 4 else Unscored("too long") for each in replies for own in each]
        return {"quality": scores}


def test_each_reply_has_the_weighted_sum_of_its_rewards():
    given = GivenScores()
    with RewardScorer([spec_from(QUALITY), spec_from(EXACT)], Path(), 1, 8, given) as rewards:
        environment = ScoredReplies(ReplyScorer(rewards, given, decode, decode), Models(), MESH)
        replies = [[reply("ab"), reply("b")], [reply("xyz"), reply("long", "length")]]
        outcomes = environment.outcomes(PROMPTS, replies)
        notes = environment.notes()
    assert [[outcome.parts for outcome in each] for each in outcomes] == [
        [{"quality": 2.0, "exact": 1.0}, {"quality": 1.0, "exact": 0.0}],
        [{"quality": 3.0, "exact": 0.0}, {"quality": None, "exact": 0.0}],
    ]
    (both, short), (other, unreadable) = outcomes
    assert (both.reward, short.reward, other.reward) == (2.0, 0.5, 1.5)
    assert math.isnan(unreadable.reward)
    [note] = notes
    assert note.startswith("reward quality: 1 replies raised an exception since the start, such as: too long")


def test_a_rank_without_rewards_has_nothing_to_tell():
    """Rank 0 scores and tells; the others have its outcomes."""
    assert ScoredReplies(None, None, MESH).notes() == []


def test_replies_of_a_run_without_rewards_have_no_reward():
    environment = UnscoredReplies()
    outcomes = environment.outcomes(PROMPTS, [[reply("ab"), reply("b")], [reply("c")]])
    assert [len(each) for each in outcomes] == [2, 1]
    assert all(math.isnan(outcome.reward) and outcome.parts == {} for each in outcomes for outcome in each)
    assert environment.notes() == []
