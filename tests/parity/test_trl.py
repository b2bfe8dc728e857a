"""Losses, gradients and training steps against TRL 1.16, from equal weights and texts, in float32."""

from __future__ import annotations

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl", reason="needs trl, the oracle of losses; it is in the extra dev")
    import trl_oracle

from trl_cases import CASES, Ours, gradient_norm, random_rows

from kumi.parallel import build_optimizer
from kumi.spec.layout import Layout
from kumi.spec.optim import Optim
from steps import mesh_of

# TRL and transformers warn of their own deprecated names.
pytestmark = pytest.mark.filterwarnings("ignore")
LOSS, NORM, TRAINED = 2e-6, 1e-5, 1e-4
STEPS, BATCHES, BATCH = 20, 3, 4
STEPPED = ("sft", "sigmoid", "ipo", "kto", "reward", "simpo", "orpo")


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(name, trl_models):
    case = CASES[name]
    rows = random_rows(case.rows, 6)
    trainer = trl_oracle.make_trainer(case.theirs, trl_models, rows, **case.their_options)
    batch = trl_oracle.collate(trainer)
    ours = Ours(case, trl_models, [rows])

    theirs = trl_oracle.sequences(batch)
    if case.kind == "reward":  # a score is of all tokens
        assert [ids for ids, _ in ours.sequences()] == [ids for ids, _ in theirs]
    else:
        assert ours.sequences() == theirs

    expected = trl_oracle.compute_loss(trainer, batch)
    expected.backward()
    assert ours.add_gradients() == pytest.approx(expected.item(), rel=LOSS)
    assert gradient_norm(ours.model) == pytest.approx(gradient_norm(trainer.model), rel=NORM)


def test_packed_replies_have_the_loss_of_trl(trl_models):
    """TRL packs the same replies to a row; kumi's are always packed."""
    rows = random_rows("replies", 6)
    options = {"packing": True, "packing_strategy": "bfd", "max_length": 128, "padding_free": True}
    trainer = trl_oracle.make_trainer("sft", trl_models, rows, **options)
    assert len(trainer.train_dataset) == 1
    expected = trl_oracle.compute_loss(trainer, trl_oracle.collate(trainer))
    assert Ours(CASES["sft"], trl_models, [rows]).add_gradients() == pytest.approx(expected.item(), rel=LOSS)


@pytest.mark.parametrize("name", STEPPED)
def test_twenty_steps_of_adamw(name, trl_models):
    case = CASES[name]
    rows = random_rows(case.rows, BATCHES * BATCH, seed=1)
    batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
    trainer = trl_oracle.make_trainer(case.theirs, trl_models, rows, BATCH, **case.their_options)
    collated = [trl_oracle.collate(trainer, range(start, start + BATCH)) for start in range(0, len(rows), BATCH)]
    ours = Ours(case, trl_models, batches)
    settings = {"betas": (0.9, 0.95), "eps": 1e-8}
    decayed = [x for x in trainer.model.parameters() if x.ndim > 1]
    others = [x for x in trainer.model.parameters() if x.ndim == 1]
    theirs = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=case.rate, **settings
    )
    optimizer = build_optimizer(ours.model, mesh_of(Layout()), Optim(lr=case.rate, weight_decay=0.1, **settings))
    for group in optimizer.param_groups:
        group["lr"] = case.rate

    losses, expected = [], []
    for step in range(STEPS):
        theirs.zero_grad()
        loss = trl_oracle.compute_loss(trainer, collated[step % BATCHES])
        loss.backward()
        theirs.step()
        expected.append(loss.item())
        optimizer.zero_grad()
        losses.append(ours.add_gradients(step % BATCHES))
        optimizer.step()
    assert losses == pytest.approx(expected, rel=TRAINED)
    last = (STEPS - 1) // BATCHES * BATCHES  # the last step of the first batch
    assert abs(losses[last] - losses[0]) >= 0.1 * losses[0]
