"""Where TRL 1.16 and kumi differ on purpose: each test states both, so that a change of either is noticed.

See docs/decisions/objectives.md."""

from __future__ import annotations

import math
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("trl", reason="needs trl, the oracle of losses; it is in the extra dev")
    import trl_oracle

from text_units import TextUnits, add_gradients, add_reference, load_model, make_batch, read_units
from trl_cases import CASES, Case, Ours, random_rows

from kumi.data.chat.masked import RowRefused
from kumi.data.packing import pack, positions_of
from kumi.objectives import OBJECTIVES
from kumi.parallel.run_microbatches import MetricSums, forward_backward
from kumi.spec.layout import Layout
from steps import mesh_of

# TRL and transformers warn of their own deprecated names.
pytestmark = pytest.mark.filterwarnings("ignore")
PAIRS = random_rows("pairs", 6)


def _odds(mean):
    return mean - torch.log1p(-mean.exp())


# kind and options -> TRL's name, and the formula of a pair: (chosen, rejected) log-probs, of the policy and minus those
# of the reference, each (sum, mean over tokens).
FORMULAS = {
    "cdpo": (
        Case("dpo", "dpo", "pairs", {"loss_type": "cdpo", "label_smoothing": 0.1}, {"label_smoothing": 0.1}),
        lambda policy, ahead: (
            -0.9 * logsigmoid(0.1 * (ahead[0][0] - ahead[1][0])) - 0.1 * logsigmoid(0.1 * (ahead[1][0] - ahead[0][0]))
        ),
    ),
    "sigmoid+sft": (
        replace(CASES["sigmoid+sft"], options={"sft": 0.5}, deviation=None),
        lambda policy, ahead: -logsigmoid(0.1 * (ahead[0][0] - ahead[1][0])) - 0.5 * policy[0][1],
    ),
    "cpo": (
        replace(CASES["cpo"], options={"sft": 1.0}, deviation=None),
        lambda policy, ahead: -logsigmoid(0.1 * (policy[0][0] - policy[1][0])) - policy[0][1],
    ),
    "orpo": (
        CASES["orpo"],
        lambda policy, ahead: -policy[0][1] - 0.1 * logsigmoid(_odds(policy[0][1]) - _odds(policy[1][1])),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_kumi_has_the_loss_of_the_paper_and_trl_another(name, trl_models):
    """TRL ignores the label smoothing of sigmoid, and its likelihoods are means over the tokens of a microbatch, those
    of ORPO over prompts too."""
    case, formula = FORMULAS[name]
    trainer = trl_oracle.make_trainer(case.theirs, trl_models, PAIRS, **case.their_options)
    units, objective = read_units(trl_models / "policy", PAIRS), OBJECTIVES[case.kind](**case.options)

    def sides(sequence):
        ids, mask = sequence[0].tolist(), (sequence[1] & 1).tolist()
        policy = trl_oracle.log_probs(trainer.model, ids, mask)
        ahead = policy - trl_oracle.log_probs(trainer.ref_model, ids, mask) if objective.reference else policy
        return (policy.sum(), policy.mean()), (ahead.sum(), ahead.mean())

    expected = [formula(*zip(*map(sides, unit), strict=True)) for unit in units.sequences]
    batch = make_batch(units, objective.rows)
    if objective.reference:
        batch = add_reference(objective, batch, load_model(trl_models / "reference"))
    ours = add_gradients(load_model(trl_models / "policy"), objective, batch)
    theirs = trl_oracle.compute_loss(trainer, trl_oracle.collate(trainer)).item()
    assert ours == pytest.approx(torch.stack(expected).mean().item(), rel=2e-6)
    assert theirs != pytest.approx(ours, rel=1e-3)


def test_trl_has_no_conservative_dpo(trl_models):
    plain, smooth = (
        trl_oracle.make_trainer("dpo", trl_models, PAIRS, loss_type=["sigmoid"], label_smoothing=smoothing)
        for smoothing in (0.0, 0.1)
    )
    first, second = (trl_oracle.compute_loss(x, trl_oracle.collate(x)).item() for x in (plain, smooth))
    assert first == second


def test_the_baseline_of_kto_is_that_of_the_step_and_not_of_a_microbatch(trl_models):
    case, rows = CASES["kto"], random_rows("feedback", 4)
    parts = [rows[:2], rows[2:]]
    trainer = trl_oracle.make_trainer("kto", trl_models, rows, 2, **case.their_options)
    batches = [trl_oracle.collate(trainer, numbers) for numbers in ((0, 1), (2, 3))]
    theirs = [trl_oracle.compute_loss(trainer, batch).item() for batch in batches]
    alone = Ours(case, trl_models, parts)
    assert [alone.add_gradients(number) for number in (0, 1)] == pytest.approx(theirs, rel=2e-6)

    objective, reference = case.objective, load_model(trl_models / "reference")
    batch = make_batch(read_units(trl_models / "policy", rows), objective.rows, 24)
    batch, model = add_reference(objective, batch, reference), load_model(trl_models / "policy")
    assert len(batch["labels"]) > 1
    whole = add_gradients(model, objective, batch)
    assert add_gradients(model, objective, batch, microbatches=2) == pytest.approx(whole, rel=2e-6)
    assert sum(theirs) / 2 != pytest.approx(whole, rel=1e-3)


def test_a_pair_that_is_too_long_is_left_out_and_not_cut(trl_models):
    """TRL cuts the end of a reply with its EOS, so that nothing teaches the model to stop."""
    row = {"prompt": "hello", "chosen": " what is the weather in Paris", "rejected": " no"}
    trainer = trl_oracle.make_trainer("dpo", trl_models, [row], max_length=6)
    cut, _ = trl_oracle.sequences(trl_oracle.collate(trainer))
    units, form = read_units(trl_models / "policy", [row]), OBJECTIVES["dpo"].rows
    [[(ids, _, _), _]] = units.sequences
    assert cut[0] == ids[:6].tolist()
    assert ids[-1] == trainer.processing_class.eos_token_id not in cut[0]
    positions = positions_of(units, form)
    assert len(pack(positions, int(positions[0]) - 1, 1).units) == 0


def test_a_word_across_the_end_of_the_prompt(trl_models):
    """TRL takes the end of the prompt away, and trains the whole word; kumi keeps the prompt of inference."""
    row = {"prompt": "what is the wea", "chosen": "ther today", "rejected": "ther no"}
    trainer = trl_oracle.make_trainer("dpo", trl_models, [row])
    (ids, trained), _ = trl_oracle.sequences(trl_oracle.collate(trainer))
    [[(ours, mask, _), _]] = read_units(trl_models / "policy", [row]).sequences

    def text(ids, trained):
        return trainer.processing_class.decode(np.array(ids)[np.array(trained) > 0])

    assert text(ids, trained) == " weather today<eos>"
    assert text(ours, mask & 1) == "ther today<eos>"


def test_a_completion_that_spells_eos_is_refused(trl_models):
    row = {"prompt": "hello", "completion": " world<eos>"}
    trainer = trl_oracle.make_trainer("sft", trl_models, [row])
    [(ids, _)] = trl_oracle.sequences(trl_oracle.collate(trainer))
    assert ids.count(trainer.processing_class.eos_token_id) == 1
    with pytest.raises(RowRefused, match="spells <eos>"):
        read_units(trl_models / "policy", [row])


def test_a_row_of_another_format_than_the_first_is_refused(trl_models, tmp_path):
    """TRL takes the format from the first row: a text after a conversation has no EOS."""
    folder = tmp_path / "models"
    shutil.copytree(trl_models, folder)
    (folder / "policy/chat_template.jinja").write_text("{% for turn in messages %}{{ turn['content'] }}{% endfor %}")
    text = {"text": "hello world", "messages": None}
    chat = {"text": None, "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " no"}]}

    def ends(rows):
        trainer = trl_oracle.make_trainer("sft", folder, rows)
        return [ids[-1] for ids, _ in trl_oracle.sequences(trl_oracle.collate(trainer))], trainer.processing_class

    alone, tokenizer = ends([text])
    (_, after), _ = ends([chat, text])
    assert alone == [tokenizer.eos_token_id] != [after]
    with pytest.raises(RowRefused, match="a row of 'chat' needs messages or conversations; this one has text"):
        read_units(trl_models / "policy", [chat, text])


def test_ties_and_log_probs_in_the_metrics(trl_models):
    """Of a policy that is its own reference, every pair is a tie. TRL counts it as wrong, and reports sums."""
    trainer = trl_oracle.make_trainer("dpo", trl_models, PAIRS)
    trl_oracle.use_policy_as_reference(trainer)
    collated = trl_oracle.collate(trainer)
    assert trl_oracle.compute_loss(trainer, collated).item() == pytest.approx(math.log(2), abs=1e-6)

    objective, model = OBJECTIVES["dpo"](), load_model(trl_models / "policy")
    batch = make_batch(read_units(trl_models / "policy", PAIRS), objective.rows)
    batch = add_reference(objective, batch, model)
    metrics = MetricSums(objective, mesh_of(Layout()))
    loss = forward_backward(model, mesh_of(Layout()), objective, [batch], objective.count(batch), metrics=metrics)
    ours = dict(zip(metrics.names, (metrics.sums[:, 0] / metrics.sums[:, 1]).tolist(), strict=True))
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    assert (ours["rewards/accuracies"], trl_oracle.metric(trainer, "rewards/accuracies")) == (0.5, 0.0)
    tokens = batch["trained"][:, 0::2].sum().item() / len(PAIRS)
    assert ours["logps/chosen"] * tokens == pytest.approx(trl_oracle.metric(trainer, "logps/chosen"), rel=2e-6)


def test_the_first_token_of_a_sequence_is_not_counted(trl_models):
    """Without a prompt and BOS nothing predicts the first token of a reply. TRL's means count it."""
    case = CASES["sigmoid-mean"]
    trainer = trl_oracle.make_trainer("dpo", trl_models, PAIRS, **case.their_options)
    collated = trl_oracle.collate(trainer)
    collated["completion_mask"] = collated["attention_mask"]
    theirs = trl_oracle.compute_loss(trainer, collated).item()

    units = read_units(trl_models / "policy", PAIRS)
    sequences = [[(ids, mask | 1, weights) for ids, mask, weights in unit] for unit in units.sequences]
    records = units.records.copy()
    records["trained"] = records["tokens"]
    objective = case.objective
    batch = make_batch(TextUnits(units.prefix, sequences, units.kind, records=records), objective.rows)
    batch, model = (
        add_reference(objective, batch, load_model(trl_models / "reference")),
        load_model(trl_models / "policy"),
    )
    counted = {**batch, "trained": batch["trained"] + (batch["trained"] > 0)}
    assert add_gradients(model, objective, batch) != pytest.approx(theirs, rel=1e-3)
    assert add_gradients(model, objective, counted) == pytest.approx(theirs, rel=2e-6)
