"""Warm-up and decay in steps, from shares of the run or numbers of steps."""

import pytest

from kumi.config import dump, load, load_plan
from kumi.config.job_sections import WARMUP_RATIO, OptimSection
from kumi.config.optim_section import choose_optim
from kumi.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "steps", "length"),
    [
        ({}, 1000, 1000 * WARMUP_RATIO),
        ({}, 1, 1),
        ({"warmup_ratio": 0.07}, 100, 7),  # in binary a little more than 7, which would be rounded up to 8
        ({"warmup_ratio": 0.05}, 30, 2),  # rounded up
        ({"warmup_ratio": 0.05}, 3, 1),
        ({"warmup_ratio": 0.99}, 10, 9),  # the last step falls
        ({"warmup_ratio": 0.0}, 100, 0),
        ({"warmup_steps": 0}, 100, 0),
        ({"warmup_steps": 20}, 400, 20),
        ({"warmup_steps": 10, "schedule": "constant"}, 10, 10),
        ({"schedule": "wsd", "decay_steps": 10}, 10, None),
        ({"schedule": "wsd", "warmup_ratio": 0.5, "decay_steps": 5}, 10, 5),
    ],
)
def test_the_warm_up_has_so_many_steps(keys, steps, length):
    if length is None:  # by default there is no room for it, and it is left out
        assert choose_optim(OptimSection(**keys), steps).warmup_steps == 0
    else:
        assert choose_optim(OptimSection(**keys), steps).warmup_steps == length


def test_schedules_that_do_not_fit_the_run_are_refused():
    assert choose_optim(OptimSection(schedule="wsd"), 100).decay_steps == 10
    for keys, words in (
        ({"schedule": "wsd", "warmup_steps": 8, "decay_steps": 5}, "warmup_steps=8 and the decay over 5 steps"),
        ({"schedule": "wsd", "warmup_steps": 0, "decay_steps": 11}, "warmup_steps=0 and the decay over 11 steps"),
        ({"schedule": "wsd", "warmup_ratio": 0.6, "decay_steps": 5}, r"warmup_ratio=0\.6 and the decay over 5 steps"),
        ({"warmup_steps": 10}, "warmup_steps=10 and a cosine decay"),
    ):
        with pytest.raises(ConfigError, match=rf"optim\.{words} do not fit into 10 steps; shorten"):
            choose_optim(OptimSection(**keys), 10)
    constant = OptimSection(schedule="constant", warmup_steps=11)
    with pytest.raises(ConfigError, match=r"warmup_steps=11 is longer than the run of 10 steps; shorten"):
        choose_optim(constant, 10)
    assert choose_optim(constant, 11).warmup_steps == 11


def test_steps_and_ratio_together_are_refused_and_the_one_in_force_is_spelled_out():
    quickstart = "examples/quickstart.toml"
    with pytest.raises(ConfigError, match=r"optim: warmup_steps=5 and warmup_ratio=0\.05 both set .* give only one"):
        load(quickstart, ["optim.warmup_steps=5"])
    with pytest.raises(ConfigError, match=r"^optim\.warmup_ratio: must be less than 1, got 1\.0$"):
        load(quickstart, ["optim.warmup_ratio=1.0"])
    with pytest.raises(ConfigError, match=r"^optim\.warmup_steps: must be [^;]*, got -1$"):
        load_plan("examples/moe.toml", ["optim.warmup_steps=-1"])
    assert "warmup_ratio = 0.05" in dump(load(quickstart))
    assert "warmup_ratio" not in dump(load("examples/moe.toml"))
    assert f"warmup_ratio = {WARMUP_RATIO}" in dump(load_plan("examples/plan/llama-3-8b.toml"))


def test_three_steps_of_the_quickstart_have_a_schedule():
    config = load("examples/quickstart.toml", ["train.steps=3"])
    optim = choose_optim(config.optim, config.train.steps)
    assert [optim.lr_at(step, 3) for step in range(3)] == [optim.lr, optim.lr, pytest.approx(0.05 * optim.lr)]
