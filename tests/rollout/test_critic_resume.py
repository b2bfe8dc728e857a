"""A killed run of PPO goes on with both models, their optimizers and the values of its batch, on any layout."""

import pytest
from tests.rollout.conftest import history, train, write_data
from tests.rollout.test_rollout_resume import ONE, TP, TWO, killed_run, rollouts
from tests.train.conftest import losses, metrics

from kumi.rollout import rollout_source
from kumi.rollout.reply_journal import ReplyJournal
from kumi.train import step as train_step_module

# Batches of three updates, with a checkpoint after two: it lies within a batch.
SETTINGS = {
    "objective": {"kind": "ppo"},
    "critic": {"lr": 3e-3, "value_clip": 0.02},
    "rollout": {"prompts": 6, "group_size": 2, "max_new_tokens": 5, "updates": 3, "samples_every": 0, "slots": 1},
}
STEPS = 6
PLACES = {
    "collecting": (ReplyJournal, "add_replies", 3),
    "scoring": (ReplyJournal, "add_outcomes", 2),
    "values": (rollout_source, "batch_metrics", 2),
    "updating": (train_step_module, "_update_critic", 4),
}
NUMBERS = ("critic/loss", "critic/grad_norm", "critic/clipped", "critic/value", "critic/explained_variance")


def run(folder, layout):
    return train(folder, **SETTINGS, train={"steps": STEPS, "out": "run", "doctor": False}, **layout)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_data(folder)
    assert run(folder, ONE) == 0
    return folder


def critic_numbers(folder):
    entries = [entry for entry in metrics(folder / "run") if "critic/loss" in entry]
    return {entry["step"]: {name: entry[name] for name in NUMBERS if name in entry} for entry in entries}


OFTEN = ("updating",)


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place in OFTEN else pytest.mark.exhaustive) for place in PLACES]
)
def test_a_killed_run_goes_on_bitwise(uninterrupted, begun, place):
    killed_run(begun, place, ONE, run, PLACES)
    assert len(losses(begun / "run")) < STEPS
    assert run(begun, ONE) == 0
    assert losses(begun / "run") == losses(uninterrupted / "run")
    assert critic_numbers(begun) == critic_numbers(uninterrupted)
    assert history(begun / "run") == history(uninterrupted / "run")


@pytest.mark.exhaustive
def test_two_kills_and_three_layouts(uninterrupted, begun):
    killed_run(begun, "updating", TWO, run, PLACES)
    # The run goes on within its first batch, and collects the second one.
    killed_run(begun, "values", ONE, run, {"values": (rollout_source, "batch_metrics", 1)})
    assert run(begun, TP) == 0
    assert rollouts(begun) == rollouts(uninterrupted)
    assert losses(begun / "run") == pytest.approx(losses(uninterrupted / "run"), rel=1e-9, abs=1e-11)
    ours, theirs = critic_numbers(begun), critic_numbers(uninterrupted)
    for step, values in theirs.items():
        assert ours[step] == pytest.approx(values, rel=1e-8, abs=1e-11)
