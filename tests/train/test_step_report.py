"""A run that diverges says which value is not finite; MFU counts the head for the tokens that it computes."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from kumi.errors import DivergedError
from kumi.train.step import StepResult
from kumi.train.step_report import Reporter, model_flops_utilisation
from kumi.train.train_state import TrainState


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (math.inf, 1.0, "the loss is inf (gradient norm 1,"),
        (2.5, math.nan, "a gradient is not finite, although the loss is 2.5 (gradient norm nan,"),
    ],
)
def test_a_diverged_run_names_the_value_that_is_not_finite(loss, norm, reason):
    run = SimpleNamespace(
        precision=SimpleNamespace(loss_scaling=False),
        optim=SimpleNamespace(lr=1e-3),
        config=SimpleNamespace(log=SimpleNamespace(every=1), train=SimpleNamespace(steps=9), rollout=None),
        step_seconds=None,
    )
    rank_state = SimpleNamespace(run=run, mesh=SimpleNamespace(device=torch.device("cpu")))
    reporter = Reporter(rank_state, TrainState(), None, 0, SimpleNamespace())
    with pytest.raises(DivergedError, match=re.escape(f"step 3: {reason}")):
        reporter.step(
            StepResult(
                3, torch.tensor(loss), torch.tensor(norm), lr=1e-3, tokens=8, data_s=0.0, metrics=torch.zeros(0, 2)
            )
        )


def test_mfu_counts_the_head_for_trained_tokens_if_many_are_not():
    job = SimpleNamespace(step_flops=lambda head_tokens: 1000 if head_tokens is None else 10 * head_tokens)
    device = SimpleNamespace(peak_flops=lambda dtype: 100.0)
    run = SimpleNamespace(
        config=SimpleNamespace(rollout=None),
        job=job,
        batch=SimpleNamespace(tokens_per_step=80),
        cluster=SimpleNamespace(device=device, assumed=()),
        precision=SimpleNamespace(compute="float32"),
        layout=SimpleNamespace(world_size=2),
    )
    shares = [model_flops_utilisation(SimpleNamespace(run=run), 10.0, trained) for trained in (None, 80, 71, 70, 8)]
    assert shares == [0.5, 0.5, 0.5, 0.35, 0.04]
