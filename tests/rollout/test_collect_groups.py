"""Collecting batches with a fake engine: rounds, spares, a bound, and what a journal spares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kumi.inference.sampling import Sampling
from kumi.parallel.mesh import Mesh, RankInfo
from kumi.rollout.collect_groups import CollectSettings, GroupCollector
from kumi.rollout.group import GeneratedReply, Outcome
from kumi.rollout.prompt_sampler import Prompt
from kumi.spec.layout import Layout

MESH = Mesh(Layout(), RankInfo(0, 1, 0, torch.device("cpu")), {})


class Prompts:
    def prompts(self, first, count):
        return [Prompt(number, [number + 1], {}, "source", number) for number in range(first, first + count)]


class Engine:
    """Replies whose tokens tell prompt, sample and noise."""

    def __init__(self):
        self.asked, self.version = [], None

    def update(self, version):
        self.version = version

    def generate(self, requests, sampling):
        for request in requests:
            self.asked.append((request.prompt, request.sample))
            ids = np.array([request.prompt, request.sample, request.noise], np.int32)
            yield request, GeneratedReply(ids, np.full(3, -1.0), "stop", self.version)


class Environment:
    """Groups of the prompts in `differ` have different rewards."""

    def __init__(self, differ):
        self.differ, self.scored = differ, []

    def notes(self):
        return [f"scored {len(self.scored)} groups"]

    def outcomes(self, prompts, replies):
        self.scored += [prompt.number for prompt in prompts]
        return [
            tuple(Outcome(float(sample * (prompt.number in self.differ)), {}) for sample in range(len(own)))
            for prompt, own in zip(prompts, replies, strict=True)
        ]


def collector(folder, differ, **settings):
    values = {"prompts": 4, "group_size": 2, "sampling": Sampling(), "chunk": 4, "dynamic": True, "max_rounds": 5}
    return GroupCollector(
        Prompts(),
        Engine(),
        Environment(differ),
        MESH,
        CollectSettings(**values | settings),
        folder / "rollouts",
        "digest",
    )


def numbers(groups):
    return [group.prompt for group in groups]


def test_a_batch_without_dynamic_sampling_is_one_round_of_all_groups(tmp_path):
    work = collector(tmp_path, differ={1}, dynamic=False, max_rounds=1)
    batch = work.collect(7, 10, [])
    assert numbers(batch.groups) == [10, 11, 12, 13]
    assert (batch.next_prompt, batch.rounds, batch.dropped, batch.spares) == (14, 1, [], [])
    assert [reply.ids.tolist() for reply in batch.groups[1].replies] == [[11, 0, 22], [11, 1, 23]]
    assert {reply.version for group in batch.groups for reply in group.replies} == {7}
    assert batch.generated == 4 * 2 * 3
    assert batch.notes == ["scored 4 groups"]


def test_groups_of_equal_rewards_are_replaced_until_the_batch_is_full(tmp_path):
    work = collector(tmp_path, differ={1, 4, 5, 6, 8, 9, 10, 11})
    batch = work.collect(0, 0, [])
    assert numbers(batch.groups) == [1, 4, 5, 6]
    # 0 to 3 gave one; the next round asks for three times four prompts.
    assert batch.next_prompt == 16
    assert numbers(batch.spares) == [8, 9, 10, 11]
    assert numbers(batch.dropped) == [0, 2, 3, 7, 12, 13, 14, 15]
    again = work.collect(1, batch.next_prompt, batch.spares)
    assert numbers(again.groups) == [8, 9, 10, 11]
    assert (again.next_prompt, again.rounds) == (16, 0)
    assert {reply.version for group in again.groups for reply in group.replies} == {0}


def test_after_the_last_round_dropped_groups_fill_the_batch_up(tmp_path):
    batch = collector(tmp_path, differ={2}, max_rounds=2).collect(0, 0, [])
    assert batch.rounds == 2
    assert numbers(batch.groups)[0] == 2
    assert len(batch.groups) == 4
    every = sorted(numbers(batch.groups) + numbers(batch.dropped) + numbers(batch.spares))
    assert every == list(range(batch.next_prompt))
    assert batch.next_prompt == 16  # one of four prompts differs, so three more need twelve


def test_rounds_are_bounded_when_no_group_differs(tmp_path):
    batch = collector(tmp_path, differ=set(), max_rounds=3).collect(0, 0, [])
    assert batch.rounds == 3
    assert batch.next_prompt == 4 + 16 + 16
    assert len(batch.groups) == 4


def test_replies_that_cannot_be_scored_differ_from_nothing(tmp_path):
    work = collector(tmp_path, differ=set(), dynamic=False)
    outcomes = (Outcome(math.nan, {"a": None}), Outcome(1.0, {"a": 1.0}))
    work.environment.outcomes = lambda prompts, replies: [outcomes] * len(prompts)
    [group, *_] = work.collect(0, 0, []).groups
    assert not group.differs
    assert math.isnan(group.rewards[0])


class Killed(Exception):
    pass


def test_what_a_killed_attempt_has_finished_is_not_done_again(tmp_path):
    whole = collector(tmp_path / "whole", differ={0, 1, 2, 3}).collect(3, 0, [])
    first = collector(tmp_path, differ={0, 1, 2, 3})

    def fail(*_):
        raise Killed

    first.environment.outcomes = fail
    with pytest.raises(Killed):
        first.collect(3, 0, [])
    assert len(first.engine.asked) == 8
    path = next((tmp_path / "rollouts").iterdir())
    lines = path.read_text().splitlines()
    assert len(lines) == 3  # two chunks after an empty line
    path.write_text("\n".join([*lines[:2], lines[2][:50]]))  # killed within the second chunk's line
    second = collector(tmp_path, differ={0, 1, 2, 3})
    batch = second.collect(3, 0, [])
    assert second.engine.asked == [(2, 0), (2, 1), (3, 0), (3, 1)]
    assert [group.plain() for group in batch.groups] == [group.plain() for group in whole.groups]
    third = collector(tmp_path, differ={0, 1, 2, 3})
    assert [group.plain() for group in third.collect(3, 0, []).groups] == [group.plain() for group in whole.groups]
    assert (third.engine.asked, third.environment.scored) == ([], [])


def test_replies_of_other_weights_or_settings_are_generated_again(tmp_path):
    collector(tmp_path, differ={0, 1, 2, 3}).collect(3, 0, [])
    other_weights = collector(tmp_path, differ={0, 1, 2, 3})
    other_weights.collect(4, 0, [])
    assert len(other_weights.engine.asked) == 8
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["batch-4-digest.jsonl"]
    other_settings = collector(tmp_path, differ={0, 1, 2, 3})
    other_settings.digest = "other"
    other_settings.collect(4, 0, [])
    assert len(other_settings.engine.asked) == 8
