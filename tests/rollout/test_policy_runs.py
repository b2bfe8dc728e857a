"""Runs of all policy gradients, with adapters, with several passes, and runs that cannot learn."""

import json
import math
import shutil

import numpy as np
import pytest
from tests.rollout.conftest import history, rollout_file, train, write_data
from tests.train.conftest import losses, metrics

from kumi.config import load
from kumi.errors import ConfigError
from kumi.objectives.policy_gradient import PolicyGradient
from kumi.objectives.policy_presets import POLICY_GRADIENTS
from kumi.rollout.group import GeneratedReply, Group, Outcome
from kumi.rollout.rollout_batch import RolloutBatch, RowSettings, UpdateSettings
from kumi.rollout.rollout_metrics import nothing_learned

SHORT = {"steps": 2, "out": "run", "doctor": False}


def folder_with_data(factory, name):
    folder = factory.mktemp(name)
    write_data(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with data, and a model in `model` that likes lowercase letters."""
    folder = folder_with_data(tmp_path_factory, "base")
    steps = {"steps": 15, "out": "run", "doctor": False}
    rollout = {"prompts": 8, "group_size": 8, "max_new_tokens": 8, "samples_every": 0}
    assert train(folder, train=steps, rollout=rollout, optim__lr=1e-2, export__enabled=True) == 0
    shutil.move(folder / "run" / "hf", folder / "model")
    shutil.rmtree(folder / "run")
    return folder


@pytest.mark.parametrize("kind", POLICY_GRADIENTS)
def test_every_preset_trains(base, tmp_path, kind):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    changes = {}
    if kind == "distill":
        changes = {"reference": {"model": "model"}, "rewards": [], "optim__lr": 1e-2}
    rollout = {"prompts": 4, "group_size": 4, "max_new_tokens": 8, "updates": 2, "passes": 2}
    steps = {**SHORT, "steps": 5}
    assert train(tmp_path, objective={"kind": kind}, rollout=rollout, train=steps, **changes) == 0
    entries = metrics(tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 5
    assert entries[0]["train/grad_norm"] > 0
    # Steps 3 and 4 go through the batch of steps 1 and 2 again, whose weights they have changed.
    assert entries[0]["train/ratio"] == pytest.approx(1, abs=1e-12)
    assert abs(entries[2]["train/ratio"] - 1) > 1e-9
    assert [entry["step"] for entry in entries if "rollout/length" in entry] == [1, 5]
    if kind == "rloo":
        assert entries[0]["train/kl"] == pytest.approx(0, abs=1e-12)


def test_distillation_comes_near_its_teacher(base, tmp_path):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    rollout = {"prompts": 8, "group_size": 4, "max_new_tokens": 8, "samples_every": 0}
    changes = {"reference": {"model": "model"}, "rewards": [], "optim__lr": 1e-2, "model__init": "random"}
    steps = {"steps": 12, "out": "run", "doctor": False, "seed": 5}
    assert train(tmp_path, objective={"kind": "distill"}, rollout=rollout, train=steps, **changes) == 0
    divergence = [entry["train/kl"] for entry in metrics(tmp_path / "run")]
    assert divergence[-1] < 0.7 * divergence[0]


def test_adapters_are_on_in_the_decoder_and_off_in_the_reference(base, tmp_path):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    changes = {
        "model": {"source": "model"},
        "data__tokenizer": "model",
        "lora": {"r": 4},
        "objective": {"kind": "grpo", "kl": "k3", "beta": 0.01},
        "optim__lr": 3e-2,
        "train": {**SHORT, "steps": 4},
    }
    assert train(tmp_path, **changes) == 0
    entries = metrics(tmp_path / "run")
    assert entries[0]["train/kl"] == pytest.approx(0, abs=1e-12)
    assert entries[-1]["train/kl"] > 1e-6
    # The sampler has the trainer's log-probs, with adapters that are not zero any more.
    assert all(entry["train/mismatch/log_prob"] < 1e-9 for entry in entries)


def test_the_first_update_with_a_batch_has_its_old_log_probs_itself(base, tmp_path, monkeypatch):
    rollout = {"prompts": 4, "group_size": 4, "max_new_tokens": 8, "updates": 2}
    options = {"rollout": rollout, "optim__lr": 1e-2, "train": {**SHORT, "steps": 4}}
    results = []
    for name, always in (("own", False), ("always", True)):
        folder = tmp_path / name
        shutil.copytree(base, folder)
        monkeypatch.setattr(PolicyGradient, "needs_old_log_probs", always)
        assert train(folder, objective={"kind": "grpo"}, **options) == 0
        results.append(
            [
                {key: value for key, value in entry.items() if key.startswith(("train/", "rollout/re"))}
                for entry in metrics(folder / "run")
            ]
        )
    assert results[0] == results[1]
    assert abs(results[0][1]["train/ratio"] - 1) > 1e-9


@pytest.mark.parametrize("layout", [{}, pytest.param({"tp": 2}, marks=pytest.mark.exhaustive)], ids=["alone", "tp"])
def test_log_probs_are_those_at_the_temperature(base, tmp_path, layout):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    rollout = {"prompts": 4, "group_size": 4, "max_new_tokens": 8, "updates": 2, "temperature": 0.6}
    changes = {"model": {"source": "model"}, "objective": {"kind": "grpo", "kl": "k3", "beta": 0.01}}
    steps = {"steps": 3, "out": "run", "doctor": False}
    devices = {"cluster": {"devices_per_node": 2 if layout else 1}, "layout": layout}
    assert train(tmp_path, rollout=rollout, optim__lr=1e-2, train=steps, **changes, **devices) == 0
    entries = metrics(tmp_path / "run")
    assert all(entry["train/mismatch/log_prob"] < 1e-9 for entry in entries if "rollout/reward" in entry)
    assert entries[0]["train/ratio"] == pytest.approx(1, abs=1e-12)
    assert entries[0]["train/kl"] == pytest.approx(0, abs=1e-12)
    assert entries[-1]["train/kl"] > 1e-9


def test_a_run_without_any_advantage_keeps_its_weights_and_ends(tmp_path, capsys):
    write_data(tmp_path)
    rewards = [{"kind": "function", "name": "same", "file": "reward.py:same"}]
    rollout = {"prompts": 4, "group_size": 3, "max_new_tokens": 4, "stop_after": 3}
    assert train(tmp_path, rewards=rewards, rollout=rollout, optim__weight_decay=0.5) == 3
    error = capsys.readouterr().err
    assert "step 3: nothing can be learned, because all advantages were 0 in 3 updates in a row" in error
    assert "all 12 scored replies of the last batch have the reward 0.5" in error
    entries = metrics(tmp_path / "run")
    assert [entry["rollout/learnable"] for entry in entries] == [0, 0]
    # The weights did not change, not even by weight decay: the same prompt again would have the same replies.
    first, second = (entry["rollout/entropy"] for entry in entries)
    assert first == pytest.approx(second, rel=0.05)
    # The last two updates before the checkpoint count after a resume, too.
    assert train(tmp_path, rewards=rewards, rollout=rollout, optim__weight_decay=0.5) == 3


def test_replies_that_cannot_be_scored_have_no_advantage(tmp_path, capsys):
    write_data(tmp_path)
    names = ("letters", "unscored")
    rewards = [{"kind": "function", "name": name, "file": f"reward.py:{name}"} for name in names[1:]]
    rollout = {"prompts": 4, "group_size": 3, "max_new_tokens": 4, "stop_after": 2}
    assert train(tmp_path, rewards=rewards, rollout=rollout) == 3
    assert "none of the 12 replies of the last batch could be scored" in capsys.readouterr().err
    [entry] = metrics(tmp_path / "run")
    assert entry["rollout/unscored"] == 12
    assert "rollout/reward" not in entry
    assert history(tmp_path / "run")[0]["rewards"] == [None] * 3


# Rewards of two groups of two replies -> the reason why nothing can be learned.
REASONS = {
    "all 3 scored replies of the last batch have the reward 0.5;": [[0.5, 0.5], [0.5, math.nan]],
    "all replies to a prompt have the same reward, between 0.25 and 1 over the prompts": [[0.25, 0.25], [1.0, 1.0]],
    "none of the 4 replies of the last batch could be scored": [[math.nan] * 2] * 2,
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_sentence_of_a_run_that_cannot_learn_has_the_reason(reason):
    reply = GeneratedReply(np.array([1], np.int32), np.zeros(1), "stop", 0)
    groups = [
        Group(number, (reply,) * 2, tuple(Outcome(reward, {"a": None}) for reward in rewards))
        for number, rewards in enumerate(REASONS[reason])
    ]
    batch = RolloutBatch(4, groups, [], UpdateSettings(), RowSettings(8, 1, 1))
    assert f"in 3 updates in a row (rollout.stop_after): {reason}" in nothing_learned(5, 3, batch)


def test_a_teacher_that_is_the_policy_teaches_nothing(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    models = {"model": {"source": "model"}, "data__tokenizer": "model", "reference": {"model": "model"}}
    rollout = {"prompts": 4, "group_size": 3, "max_new_tokens": 4, "stop_after": 2}
    assert train(tmp_path, objective={"kind": "distill"}, rewards=[], rollout=rollout, train=SHORT, **models) == 3
    error = capsys.readouterr().err
    assert "step 2: nothing can be learned" in error
    assert "tokens of the last batch the policy's own log-probs; set reference.model to another model" in error


REFUSED = {
    "top_p": ({"rollout": {"top_p": 0.9}}, "top_p=0.9 is refused: without the less likely tokens"),
    "top_k": ({"rollout": {"top_k": 50}}, "top_k=50 is refused"),
    "updates": ({"rollout": {"prompts": 4, "updates": 3}}, "updates=3 does not divide prompts=4"),
    "rows": ({"rollout": {"max_new_tokens": 32}}, "leaves no room for a prompt in a row of batch.seq_len=32"),
    "epochs": ({"train": {"epochs": 2, "out": "run"}}, "give train.steps"),
    "critic": ({"critic": {"lr": 1e-3}}, "objective.kind='grpo' trains no critic; remove [critic]"),
    "group": ({"rollout": {"group_size": 1}}, "'group_std' compares the replies to a prompt with each other"),
    "dropped by a critic": ({"objective": {"kind": "ppo"}, "rollout": {"dynamic": True}}, "set rollout.dynamic=false"),
    "discount": ({"objective": {"kind": "ppo", "gamma": 1.5}}, "gamma=1.5 must be at most 1"),
    "discounts": ({"objective": {"kind": "grpo", "gae_lambda": 0.9}}, "advantage='gae' discounts by it; remove it"),
    "teacher": ({"objective": {"kind": "distill"}}, "set reference.model to the teacher"),
    "dropped": (
        {"objective": {"kind": "distill"}, "reference": {"model": "m"}, "rollout": {"dynamic": True}},
        "set rollout.dynamic=false",
    ),
    "rewards": ({"rewards": []}, "none is configured; add a table [[rewards]]"),
    "objective": ({"objective": {"kind": "sft"}, "rewards": []}, "objective.kind='sft' trains on the data"),
    "rewards of data": ({"objective": {"kind": "sft"}}, "not on replies with rewards; remove [[rewards]]"),
    "held out": ({"eval": {"every": 2}, "data__validation": 0.1}, "no loss on held-out prompts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_go_together_are_refused(tmp_path, name):
    changes, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        load(rollout_file(tmp_path, **changes))
    assert words in str(caught.value)


def test_an_objective_of_reinforcement_learning_needs_rollouts(tmp_path):
    with pytest.raises(ConfigError, match=r"trains on replies that the model generates; add \[rollout\]"):
        load(rollout_file(tmp_path, rollout=None))


def test_prompts_that_leave_no_room_are_left_out(tmp_path, capsys):
    write_data(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "".join(map(chr, range(33, 120))), "answer": "a"}) + "\n")
    assert train(tmp_path, train=SHORT) == 0
    assert "60 prompts; 1 longer than 24 tokens left out" in capsys.readouterr().out
    assert not math.isnan(losses(tmp_path / "run")[2])
