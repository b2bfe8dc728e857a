"""A run of GRPO in one process: it learns, and says what it has done."""

from itertools import pairwise

import pytest
from tests.rollout.conftest import history, train, write_data
from tests.train.conftest import losses, metrics


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learned")
    write_data(folder)
    settings = {"prompts": 8, "group_size": 8, "max_new_tokens": 8, "samples_every": 10}
    changes = {"rollout": settings, "train__steps": 25, "optim__lr": 1e-2, "export__enabled": True}
    assert train(folder, precision={"kind": "fp32"}, **changes) == 0
    return folder / "run"


def test_the_reward_rises(learned):
    rewards = [entry["rollout/reward"] for entry in metrics(learned)]
    assert len(losses(learned)) == 25
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2, rewards


def test_steps_have_estimates_beside_what_they_measured(learned):
    entries = [entry for entry in metrics(learned) if "train/loss" in entry]
    assert len(entries) == 25
    for entry in entries:
        parts = [entry[f"time/estimated_{name}_s"] for name in ("generate", "log_probs", "train")]
        assert entry["time/train_s"] > 0
        assert parts[0] > 0
        assert parts[1] == 0  # one update a batch needs no log-probs before it
        assert parts[2] > 0
    # The rewards of the batch before count, too.
    for before, entry in pairwise(entries):
        parts = sum(entry[f"time/estimated_{name}_s"] for name in ("generate", "log_probs", "train"))
        assert entry["perf/estimated_step_s"] == pytest.approx(parts + before["time/score_s"])
    # The first batch has no lengths before it: the plan takes all prompts and replies to be as long as they may be. The
    # second one has those of the first, and the measured/estimated of its generation.
    first, second = entries[:2]
    assert first["perf/planned_step_s"] == pytest.approx(first["perf/estimated_step_s"])
    ratio = first["time/generate_s"] / first["time/estimated_generate_s"]
    assert second["time/estimated_generate_s"] / ratio < first["time/estimated_generate_s"]
    assert second["perf/planned_step_s"] != pytest.approx(second["perf/estimated_step_s"])


def test_every_prompt_is_in_the_history_once(learned):
    entries = history(learned)
    assert [entry["prompt"] for entry in entries] == list(range(25 * 8))
    assert all(entry["accepted"] and entry["step"] == entry["batch"] for entry in entries)
    assert {len(entry["rewards"]) for entry in entries} == {8}
    # An epoch reads each of the 60 rows once.
    assert sorted(entry["row"] for entry in entries[:60]) == list(range(60))


def test_metrics_are_those_of_the_history(learned):
    of_step = {entry["step"]: entry for entry in metrics(learned)}
    for step in (1, 25):
        groups = [entry for entry in history(learned) if entry["step"] == step - 1]
        rewards = [reward for group in groups for reward in group["rewards"]]
        lengths = [length for group in groups for length in group["tokens"]]
        ends = [finish for group in groups for finish in group["finish"]]
        assert of_step[step]["rollout/reward"] == pytest.approx(sum(rewards) / 64)
        assert of_step[step]["rollout/reward/letters"] == pytest.approx(sum(rewards) / 64)
        assert of_step[step]["rollout/length"] == sum(lengths) / 64
        assert of_step[step]["rollout/longest"] == max(lengths)
        assert of_step[step]["rollout/truncated"] == ends.count("length") / 64
        assert of_step[step]["rollout/next_prompt"] == 8 * step
        assert of_step[step]["train/mismatch/log_prob"] < 1e-4
        assert of_step[step]["train/ratio"] == 1
        assert of_step[step]["time/data_s"] >= of_step[step]["time/generate_s"] > 0
    assert sum(entry["rollout/length"] * 64 for entry in of_step.values()) == pytest.approx(of_step[25]["tokens"])


def test_a_page_of_replies_with_their_rewards_every_ten_batches(learned):
    pages = sorted(path.name for path in (learned / "samples").iterdir())
    assert pages == ["rollout-0.md", "rollout-10.md", "rollout-20.md"]
    page = (learned / "samples" / "rollout-0.md").read_text()
    first = history(learned)[0]
    assert f"## Prompt 0, row {first['row']} of prompts_jsonl\n\n```text\nsay " in page
    assert page.count("nats a token:") == 3 * 8
    assert f"Reward {first['rewards'][0]:g} (letters {first['rewards'][0]:g}); {first['tokens'][0]} tokens" in page
