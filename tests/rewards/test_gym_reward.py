"""The reward of problems of reasoning-gym."""

from __future__ import annotations

import json

import pytest

from kumi.data.gym_task import problem_rows
from kumi.errors import ConfigError, KumiError
from kumi.rewards import RewardRequest, RewardScorer, spec_from


@pytest.fixture(scope="module")
def row():
    pytest.importorskip("reasoning_gym", reason="needs pip install 'kumi[reasoning]'")
    [row] = problem_rows("aiw", {}, 3, 1, "train")
    return json.loads(json.dumps(row))


def scores(row, replies, tmp_path, **keys):
    spec = spec_from({"kind": "reasoning-gym", **keys})
    with RewardScorer([spec], tmp_path, workers=1, max_new_tokens=64) as scorer:
        results = scorer.score([RewardRequest(row["prompt"], reply, row, 5, False) for reply in replies])
    return [result.total for result in results], scorer.faults


def test_the_last_answer_between_tags_is_scored_by_the_task(row, tmp_path):
    right = row["answer"]
    replies = [f"<answer>{right}</answer>", f"<answer>x</answer> <answer>{right}</answer>", right, "", "<answer>x"]
    totals, _ = scores(row, replies, tmp_path)
    assert totals[:2] == [1, 1]
    assert totals[2:] == [0, 0, 0]


def test_without_tags_the_text_after_a_mark_is_scored(row, tmp_path):
    totals, _ = scores(row, [f"Answer: {row['answer']}", row["answer"]], tmp_path, tag="", after="Answer:")
    assert totals == [1, 0]


def test_partial_scores_are_those_of_the_task(row, tmp_path):
    import reasoning_gym

    problem = {"answer": row["answer"], "metadata": row["reasoning_gym"]["metadata"]}
    reply = f"{row['answer']} of them"
    own = reasoning_gym.create_dataset("aiw", seed=0, size=1).score_answer(reply, problem)
    assert 0 < own < 1
    assert scores(row, [f"<answer>{reply}</answer>"], tmp_path)[0] == [own]


def test_rows_of_other_data_and_of_tasks_that_evaluate_are_faults(row, tmp_path):
    with pytest.raises(KumiError, match="column 'reasoning_gym' is 'x', not a problem of reasoning-gym"):
        scores({**row, "reasoning_gym": "x"}, ["<answer>1</answer>"], tmp_path)
    with pytest.raises(KumiError, match="its scorer calls parse_expr"):
        scores({**row, "reasoning_gym": {"task": "countdown"}}, ["<answer>1</answer>"], tmp_path)


def test_without_the_package_it_is_refused_at_the_start(monkeypatch, tmp_path):
    from importlib.metadata import PackageNotFoundError

    from kumi.data import gym_task
    from kumi.rewards.gym_reward import gym_reward

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(gym_task, "version", missing)
    gym_task._package.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'kumi\[reasoning\]'"):
        gym_reward(spec_from({"kind": "reasoning-gym"}))
