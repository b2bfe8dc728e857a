"""PPO in float16: one loss scale for the policy and the critic. Where the gradients of the critic alone overflow, its
update is skipped and that of the policy is not, and the scale falls until both are finite."""

import numpy as np
import pytest
import torch
from tests.rollout.conftest import train, write_data
from tests.rollout.test_critic import SETTINGS, VALUE_CLIP, Batch, checkpoint_of, critic_loss
from tests.train.conftest import metrics

from kumi.convert.open_model import open_source
from kumi.storage.checkpoint import open as open_checkpoint

STEPS = 12
# Returns of about 1,000 are far from the values of a fresh critic, so that its gradients are large. Advantages are
# whitened, so those of the policy are not. All steps train on one batch.
CHANGES = {
    "precision": {"kind": "fp16"},
    "rewards": [{"kind": "function", "name": "some", "file": "reward.py:at_times", "weight": 10_000.0}],
    "rollout": {**SETTINGS["rollout"], "passes": STEPS // 2},
    "train": {"steps": STEPS, "out": "run", "doctor": False},
    "optim": {**SETTINGS["optim"], "lr": 1e-3},
    "checkpoint": {"every": 1, "keep": STEPS},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp16")
    write_data(folder)
    assert train(folder, **SETTINGS | CHANGES) == 0
    return folder


@pytest.fixture(scope="module")
def first_finite(trained):
    """The number of the first step in which the critic's gradients are finite."""
    return next(entry["step"] for entry in metrics(trained / "run") if entry["critic/grad_norm"] is not None)


def weights(folder, step, prefix):
    """The parameters of a model in the checkpoint after `step`."""
    saved = open_checkpoint(checkpoint_of(folder, step))
    return {name: saved.read(name) for name in saved.tensors if name.startswith(f"{prefix}model/")}


def is_updated(folder, step, prefix):
    """Return True if `step` has changed a model."""
    before, after = (weights(folder, number, prefix) for number in (step - 1, step))
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_an_overflow_of_the_critic_skips_its_update_only(trained, first_finite):
    entries = metrics(trained / "run")
    assert 2 < first_finite < STEPS
    for entry in entries:
        step = entry["step"]
        skips = step < first_finite
        assert (entry["critic/grad_norm"] is None) == skips
        assert entry["train/grad_norm"] is not None
        assert entry["train/skipped_updates"] == min(step, first_finite - 1)
        assert entry["train/loss_scale"] == 2.0 ** (16 - min(step, first_finite - 1))
        if step > 1:
            assert (is_updated(trained, step, ""), is_updated(trained, step, "critic/")) == (True, not skips)


def test_loss_and_gradient_are_those_of_double_precision(trained, first_finite):
    """The loss scale is out of both: the first finite step, from the weights of the checkpoint before it."""
    batch, entry = Batch(trained), metrics(trained / "run")[first_finite - 1]
    update = (first_finite - 1) % 2
    critic = open_source(checkpoint_of(trained, first_finite - 1), critic=True).decoder(torch.float64).eval()
    terms = []
    for number in batch.part(update):
        if batch.returns[number] is None:
            continue
        prompt, reply = batch.prompts[number], batch.replies[number]
        values = critic(torch.tensor([[*prompt, *reply[:-1].tolist()]]))[0, len(prompt) - 1 :]
        before, target = (torch.from_numpy(each[number]) for each in (batch.values, batch.returns))
        near = torch.clamp(values, before - VALUE_CLIP, before + VALUE_CLIP)
        terms.append(torch.maximum((values - target) ** 2, (near - target) ** 2) / 2)
    loss = torch.cat(terms).mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in critic.parameters()]).norm()
    assert entry["critic/loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert entry["critic/grad_norm"] == pytest.approx(norm.item(), rel=1e-2)


def test_the_loss_of_a_skipped_step_is_that_of_the_fresh_critic(trained):
    batch, (first, *_) = Batch(trained), metrics(trained / "run")
    loss, clipped = critic_loss(batch, 0, lambda number: batch.values[number])
    assert first["critic/loss"] == pytest.approx(loss, rel=1e-3)
    assert (first["critic/clipped"], clipped) == (0, 0)
    assert np.isfinite(np.concatenate(batch.values)).all()
