"""A run that is killed in collecting, in scoring and in updating goes on as if nothing had happened, on any layout."""

import os
from statistics import median

import pytest
from tests.rollout.conftest import history, train, write_data
from tests.train.conftest import losses, metrics

from forked import run_forked
from kumi.inference.batched_decoder import BatchedDecoder
from kumi.rollout import rollout_source
from kumi.rollout.reply_journal import ReplyJournal
from kumi.storage import checkpoint as checkpoint_module
from kumi.train import step as train_step_module

# Batches of two updates; dynamic sampling leaves spares, as the rewards of few short replies are often equal.
ROLLOUT = {
    "prompts": 4,
    "group_size": 3,
    "max_new_tokens": 4,
    "updates": 2,
    "dynamic": True,
    "samples_every": 0,
    "slots": 1,  # chunks of 8 replies
}
STEPS = 8
ONE, TWO = {}, {"cluster": {"devices_per_node": 2}, "layout": {"dp_shard": 2, "zero": 3}}
TP = {"cluster": {"devices_per_node": 2}, "layout": {"tp": 2}}
# Where a run is killed: the function, and the number of its call at which the process ends.
KILLS = {
    "collecting": (ReplyJournal, "add_replies", 3),
    "decoding": (BatchedDecoder, "_share", 4),
    "scoring": (ReplyJournal, "add_outcomes", 3),
    "updating": (train_step_module, "_update", 5),
    # Between the lines of the groups that are accepted and those of the groups that are dropped.
    "history": (rollout_source, "append_history", 3),
    "saving": (checkpoint_module, "write_pieces", 2),
}


def run(folder, layout, **changes):
    rewards = [{"kind": "function", "name": "any", "file": "reward.py:any_letter"}]
    steps = {"steps": STEPS, "out": "run", "doctor": False}
    return train(folder, rollout=ROLLOUT, rewards=rewards, train=steps, **layout, **changes)


def run_in_single_precision(folder, layout):
    """Train in the number format whose speed on this machine is known, so that the steps have estimates."""
    return run(folder, layout, precision={"kind": "fp32"})


def killed_run(folder, place, layout, run=run, kills=KILLS):
    """Run until the process dies at `place`."""
    owner, name, calls = kills[place]

    def die():
        function, left = getattr(owner, name), [calls]

        def counting(*args, **kwargs):
            result = function(*args, **kwargs)
            left[0] -= 1
            if not left[0]:
                os._exit(9)
            return result

        setattr(owner, name, counting)
        raise SystemExit(run(folder, layout))

    code, _, error = run_forked(die)
    assert code in (7, 9), error  # 7: other ranks saw the death


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_data(folder)
    assert run(folder, ONE) == 0
    return folder


def rollouts(folder):
    """The history without the order of reading: which replies to which prompts were accepted, with their rewards."""
    return [{key: entry[key] for key in entry if key != "versions"} for entry in history(folder / "run")]


def test_the_run_has_what_the_kills_should_meet(uninterrupted):
    entries = history(uninterrupted / "run")
    assert any(not entry["accepted"] for entry in entries)
    assert any(min(entry["versions"]) < entry["step"] for entry in entries if entry["accepted"])
    assert max(entry["rollout/rounds"] for entry in metrics(uninterrupted / "run") if "rollout/rounds" in entry) > 1


@pytest.mark.parametrize("place", KILLS)
def test_a_killed_run_goes_on_bitwise(uninterrupted, begun, place):
    killed_run(begun, place, ONE)
    assert len(losses(begun / "run")) < STEPS
    assert run(begun, ONE) == 0
    assert losses(begun / "run") == losses(uninterrupted / "run")
    assert history(begun / "run") == history(uninterrupted / "run")


def test_every_prompt_is_accepted_or_dropped_or_a_spare_once(uninterrupted):
    numbers = [entry["prompt"] for entry in history(uninterrupted / "run")]
    last = [entry for entry in metrics(uninterrupted / "run") if "rollout/spares" in entry][-1]
    assert len(numbers) == len(set(numbers))
    assert len(numbers) + last["rollout/spares"] == last["rollout/next_prompt"]


def test_two_kills_and_three_layouts(uninterrupted, begun):
    killed_run(begun, "updating", TWO)
    killed_run(begun, "collecting", ONE)
    assert run(begun, TP) == 0
    assert rollouts(begun) == rollouts(uninterrupted)
    assert losses(begun / "run") == pytest.approx(losses(uninterrupted / "run"), rel=1e-9, abs=1e-12)


def test_estimates_of_a_killed_run_are_refined_by_the_steps_before(begun):
    assert run_in_single_precision(begun, ONE) == 0
    whole, parts = metrics((begun / "run").rename(begun / "whole")), ("generate", "log_probs", "train")
    killed_run(begun, "updating", ONE, run_in_single_precision)
    before = len(metrics(begun / "run"))
    assert run_in_single_precision(begun, ONE) == 0
    entries, latest = metrics(begun / "run"), {part: [] for part in parts}
    assert 0 < before < len(entries) == STEPS
    for own, theirs in zip(entries, whole, strict=True):
        for part in parts:
            planned = own.get(f"time/planned_{part}_s")
            assert planned == theirs.get(f"time/planned_{part}_s")
            if planned:
                ratio = median(latest[part][-5:]) if latest[part] else 1
                assert own[f"time/estimated_{part}_s"] == pytest.approx(planned * ratio)
                latest[part].append(own[f"time/{part}_s"] / planned)
    assert all(latest.values())
