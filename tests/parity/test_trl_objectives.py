"""Objectives against TRL 1.16: losses and gradients of one batch, and twenty steps of AdamW, in float32.

Both sides have the same weights, read by kumi from the Hugging Face folder, and the same tokens; kumi packs them into
rows. Where TRL deviates from the paper, a test states how, and puts the deviation in.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

if find_spec("trl") is None or find_spec("datasets") is None:
    pytest.skip("TRL is not installed (pip install trl==1.16.0)", allow_module_level=True)

from trl_oracle import TOKENS, model, near, trainer

from kumi.convert import weights_reader
from kumi.data import SequentialSampler
from kumi.data.packing import PackedRows, pack, positions_of
from kumi.objectives import IGNORED, OBJECTIVES
from kumi.objectives.preferences import pairs_of, token_means
from kumi.parallel import build
from kumi.parallel.mesh import build_mesh, init_distributed
from kumi.parallel.run_microbatches import forward_backward, shard_batch, sum_sequences
from kumi.spec import families
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from memory_units import MemoryUnits

# TRL uses names that transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SEQ_LEN = 48
PAIRS = [
    {"prompt": "what is the weather", "chosen": " sunny today in Paris", "rejected": " no"},
    {"prompt": "hello", "chosen": " world", "rejected": " what is what is what"},
    {"prompt": "the weather in Paris is", "chosen": " the weather", "rejected": " hello hello"},
]
REPLIES = [
    {"prompt": "what is the weather", "completion": " sunny today in Paris", "label": True},
    {"prompt": "hello", "completion": " world", "label": False},
    {"prompt": "what", "completion": " is today", "label": True},
    {"prompt": "Paris", "completion": " what is what", "label": False},
]
POLICY, REFERENCE = model(0), near(model(0), 1)
LOSS, GRADIENT, STEPS = 2e-6, 1e-5, 1e-4


@dataclass
class Side:
    """A model of kumi with one batch of packed rows, and its loss."""

    model: torch.nn.Module
    batch: dict
    objective: object

    def loss(self) -> torch.Tensor:
        units = self.objective.count(self.batch)
        return forward_backward(self.model, MESH, self.objective, [self.batch], units)


MESH = build_mesh(Layout(), init_distributed())


def kumi_model(folder: Path, hf: torch.nn.Module) -> torch.nn.Module:
    """Return kumi's model with the weights of `hf`, through a Hugging Face folder."""
    hf.save_pretrained(folder)
    spec = families.from_hf(families.read_config(folder))
    return build(spec, MESH, PRECISIONS["fp32"], weights=weights_reader(folder, spec))


def rows(objective, units: list, labels=None, margins=None, reference=None) -> dict:
    """Return `units`, lists of sequences (ids, is trained), as one batch of packed rows."""
    form = objective.rows
    sequences = [[(ids, trained.astype(np.uint8), np.ones(len(ids), np.float32)) for ids, trained in u] for u in units]
    memory = _Units(Path("units"), sequences, form.kinds[0], labels=labels, margins=margins)
    packed = PackedRows(memory, pack(positions_of(memory, form), SEQ_LEN, 0), SEQ_LEN, form)
    batch = SequentialSampler([packed], SEQ_LEN).batch(0, packed.rows)
    batch = {name: torch.from_numpy(column) for name, column in batch.items()}
    if reference is not None:
        sharded = [shard_batch(objective, batch, MESH)]
        batch["reference"] = sum_sequences(reference, MESH, sharded)[0]
        if form.mismatched:
            batch["mismatched_reference"] = sum_sequences(reference, MESH, sharded, "mismatched_")[0]
    return batch


@dataclass
class _Units(MemoryUnits):
    labels: list | None = None
    margins: list | None = None

    @property
    def columns(self):
        columns = super().columns
        if self.labels is not None:
            columns["label"] = self.labels
        columns["margin"] = np.nan if self.margins is None else self.margins
        return columns


def sequences_of(batch, prefix="") -> list:
    """Return the sequences of a collated batch of TRL's, with the mask of its completions."""
    mask = batch.get(f"{prefix}completion_mask", batch["attention_mask"])
    parts = zip(batch[f"{prefix}input_ids"], mask, batch[f"{prefix}attention_mask"], strict=True)
    return [(ids[used > 0].numpy(), (trained[used > 0] > 0).numpy()) for ids, trained, used in parts]


def of_labels(batch, side: str) -> list:
    """Return the sequences of one side of a batch of ORPO or CPO, whose prompts have the label -100."""
    parts = zip(batch[f"{side}_input_ids"], batch[f"{side}_labels"], batch[f"{side}_attention_mask"], strict=True)
    return [(ids[used > 0].numpy(), (labels[used > 0] != IGNORED).numpy()) for ids, labels, used in parts]


def pairs_in(batch) -> list:
    both = sequences_of(batch)
    return [[both[number], both[number + len(both) // 2]] for number in range(len(both) // 2)]


def side(tmp_path, objective, units, hf=POLICY, reference=None, **columns) -> Side:
    other = None if reference is None else kumi_model(tmp_path / "reference", reference)
    batch = rows(objective, units, reference=other, **columns)
    return Side(kumi_model(tmp_path / "policy", hf), batch, objective)


def agree(made, oracle_loss, own: Side, expected=None) -> None:
    """Assert that loss and gradient norm agree; `expected` turns TRL's loss into the paper's."""
    loss = oracle_loss()
    loss = loss if expected is None else expected(loss)
    loss.backward()
    assert own.loss().item() == pytest.approx(loss.item(), rel=LOSS)
    norms = [
        torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]))
        for net in (made.model, own.model)
    ]
    assert norms[1].item() == pytest.approx(norms[0].item(), rel=GRADIENT)


# kumi's options -> TRL's
DPO = {
    "sigmoid": ({"beta": 0.1}, {"loss_type": ["sigmoid"], "beta": 0.1}),
    "hinge": ({"loss_type": "hinge"}, {"loss_type": ["hinge"], "beta": 0.1}),
    "ipo": ({"loss_type": "ipo"}, {"loss_type": ["ipo"], "beta": 0.1}),
    "robust": (
        {"loss_type": "robust", "label_smoothing": 0.1},
        {"loss_type": ["robust"], "beta": 0.1, "label_smoothing": 0.1},
    ),
    "norm": ({"length": "mean"}, {"loss_type": ["sigmoid_norm"], "beta": 0.1}),
    "apo_zero": ({"loss_type": "apo_zero"}, {"loss_type": ["apo_zero"], "beta": 0.1}),
    "apo_down": ({"loss_type": "apo_down"}, {"loss_type": ["apo_down"], "beta": 0.1}),
}


@pytest.mark.parametrize("kind", DPO)
def test_dpo_equals_trl(tmp_path, kind):
    options, theirs = DPO[kind]
    made, batch, loss = trainer("dpo", POLICY, PAIRS, tmp_path, REFERENCE, **theirs)
    agree(made, loss, side(tmp_path, OBJECTIVES["dpo"](**options), pairs_in(batch), reference=REFERENCE))


def test_the_tokens_of_a_pair_are_those_that_kumi_makes(tmp_path):
    """kumi's tokens and masks of plain pairs, for a tokenizer without BOS, are TRL's."""
    from kumi.data import load_tokenizer
    from kumi.data.formats.example import Example, PlainText

    _, batch, _ = trainer("dpo", POLICY, PAIRS, tmp_path, REFERENCE)
    TOKENS.save_pretrained(tmp_path / "tokenizer")
    encoder = plain_encoder(load_tokenizer(tmp_path / "tokenizer"))
    for row, unit in zip(PAIRS, pairs_in(batch), strict=True):
        both = tuple(PlainText(row["prompt"], row[name]) for name in ("chosen", "rejected"))
        [encoded] = encoder.encode(Example("preference", both, "file", 1))
        for sequence, (ids, trained) in zip(encoded.sequences, unit, strict=True):
            assert list(sequence.ids) == ids.tolist()
            assert [mask & 1 for mask in sequence.mask] == trained.astype(int).tolist()


def plain_encoder(tokens):
    from types import SimpleNamespace

    from kumi.data.chat.encode import ConversationEncoder

    limits = SimpleNamespace(start=lambda: None, end=lambda: None)
    template = SimpleNamespace(text="", tool_text=None)
    return ConversationEncoder(SimpleNamespace(template=template, limits=limits, kwargs={}), tokens, ["<eos>"])


def test_trl_ignores_the_smoothing_of_sigmoid_so_cdpo_follows_the_formula(tmp_path):
    _made, batch, loss = trainer("dpo", POLICY, PAIRS, tmp_path, REFERENCE, loss_type=["sigmoid"], label_smoothing=0.1)
    plain = trainer("dpo", POLICY, PAIRS, tmp_path, REFERENCE, loss_type=["sigmoid"])[2]
    assert loss().item() == plain().item()
    own = side(tmp_path, OBJECTIVES["dpo"](loss_type="cdpo", label_smoothing=0.1), pairs_in(batch), reference=REFERENCE)
    h = h_of(own, reference=True)
    expected = (-0.9 * F.logsigmoid(0.1 * h) - 0.1 * F.logsigmoid(-0.1 * h)).mean().item()
    assert own.loss().item() == pytest.approx(expected, rel=LOSS)


def totals_of(own: Side) -> torch.Tensor:
    """Return the sums of log-probs of the pairs, (pairs, 2), in the order of the rows."""
    totals = sum_sequences(own.model, MESH, [shard_batch(own.objective, own.batch, MESH)])[0]
    exist = own.batch["trained"] > 0
    return totals[exist].view(-1, 2)


def h_of(own: Side, *, reference: bool) -> torch.Tensor:
    exist = own.batch["trained"] > 0
    ahead = totals_of(own) - (own.batch["reference"][exist].view(-1, 2) if reference else 0)
    return ahead[:, 0] - ahead[:, 1]


def test_the_sft_term_is_a_mean_of_pairs_where_trl_takes_the_mean_of_tokens(tmp_path):
    _made, batch, loss = trainer(
        "dpo", POLICY, PAIRS, tmp_path, REFERENCE, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.3]
    )
    own = side(tmp_path, OBJECTIVES["dpo"](sft=0.3), pairs_in(batch), reference=REFERENCE)
    chosen, n = totals_of(own)[:, 0], own.batch["trained"][own.batch["trained"] > 0].view(-1, 2)[:, 0]
    difference = 0.3 * (-(chosen / n).mean() + chosen.sum() / n.sum()).item()
    assert abs(difference) > 1e-3
    assert own.loss().item() == pytest.approx(loss().item() + difference, rel=LOSS)


def test_kto_equals_trl(tmp_path):
    options = {"beta": 0.1, "undesirable_weight": 1.33}
    made, batch, loss = trainer("kto", POLICY, REPLIES, tmp_path, REFERENCE, **options)
    units = [[sequence] for sequence in sequences_of(batch)]
    labels = [int(row["label"]) for row in REPLIES]
    own = side(tmp_path, OBJECTIVES["kto"](**options), units, reference=REFERENCE, labels=labels)
    # Both pair a prompt with the reply of the row before.
    theirs = {tuple(ids.tolist()) for ids, _ in sequences_of(batch, "KL_")}
    mine = set()
    for row, segments in zip(own.batch["mismatched_input_ids"], own.batch["mismatched_document_ids"], strict=True):
        for number in segments.unique():
            mine.add(tuple(row[segments == number].tolist()))
    assert {ids[:-1] for ids in theirs} <= mine
    agree(made, loss, own)


def test_a_reward_model_equals_trl(tmp_path):
    policy = model(0, scores=True)
    data = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} | {"margin": 0.3} for row in PAIRS]
    made, batch, loss = trainer("reward", policy, data, tmp_path, center_rewards_coefficient=0.01)
    objective = OBJECTIVES["reward"](center_rewards=0.01)
    own = side(tmp_path, objective, pairs_in(batch), hf=policy, margins=[0.3] * len(PAIRS))
    agree(made, loss, own)


def test_sft_equals_trl_padded_and_packed(tmp_path):
    data = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    made, batch, loss = trainer("sft", POLICY, data, tmp_path)
    parts = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    units = [[(ids[used > 0].numpy(), (labels[used > 0] != IGNORED).numpy())] for ids, labels, used in parts]
    own = side(tmp_path, OBJECTIVES["sft"](), units)
    assert len(own.batch["labels"]) < len(units)  # packed
    agree(made, loss, own)


def test_orpo_equals_trl_but_for_its_likelihood(tmp_path):
    """TRL puts BOS before the prompt; its likelihood is a mean over the tokens of prompts and completions."""
    _made, batch, loss = trainer("orpo", POLICY, PAIRS, tmp_path, beta=0.1)
    chosen, rejected = of_labels(batch, "chosen"), of_labels(batch, "rejected")
    assert all(ids[0] == TOKENS.bos_token_id for ids, _ in chosen)
    units = [list(pair) for pair in zip(chosen, rejected, strict=True)]
    own = side(tmp_path, OBJECTIVES["orpo"](beta=0.1), units)
    n = own.batch["trained"][own.batch["trained"] > 0].view(-1, 2)[:, 0]
    mine = -(totals_of(own)[:, 0] / n).mean().item()
    whole = [[(ids, np.arange(len(ids)) > 0)] for ids, _ in chosen]
    lm = side(tmp_path, OBJECTIVES["sft"](), whole)
    theirs = lm.loss().item()
    assert own.loss().item() - mine + theirs == pytest.approx(loss().item(), rel=LOSS)
    assert abs(mine - theirs) > 1e-2


@pytest.mark.parametrize("kind", ["simpo", "cpo"])
def test_simpo_and_cpo_equal_trl_but_for_the_mean_of_the_likelihood(tmp_path, kind):
    """TRL puts BOS before the prompt; the likelihood that CPO adds is a mean over the tokens of the batch."""
    options = {"simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}, "cpo": {"beta": 0.1}}
    _made, batch, loss = trainer("cpo", POLICY, PAIRS, tmp_path, **options[kind])
    units = [list(pair) for pair in zip(of_labels(batch, "chosen"), of_labels(batch, "rejected"), strict=True)]
    own = side(tmp_path, OBJECTIVES[kind](), units)
    n = own.batch["trained"][own.batch["trained"] > 0].view(-1, 2)[:, 0]
    chosen = totals_of(own)[:, 0]
    difference = 0.0 if kind == "simpo" else (-(chosen / n).mean() + chosen.sum() / n.sum()).item()
    assert own.loss().item() == pytest.approx(loss().item() + difference, rel=LOSS)


def test_an_unequal_tie_counts_as_half_where_trl_counts_it_as_wrong(tmp_path):
    _made, batch, _ = trainer("dpo", POLICY, PAIRS, tmp_path, POLICY)
    own = side(tmp_path, OBJECTIVES["dpo"](), pairs_in(batch), reference=POLICY)
    totals = sum_sequences(own.model, MESH, [shard_batch(own.objective, own.batch, MESH)])[0]
    sums = own.objective.measure(own.batch["reference"], own.batch | {"reference": own.batch["reference"]})
    assert (sums[3, 0] / sums[3, 1]).item() == 0.5
    assert totals.shape == own.batch["reference"].shape


class OddsOnly(OBJECTIVES["orpo"]):
    """ORPO without its likelihood, which the test adds as TRL does."""

    def sequence_loss(self, totals, batch, units):
        likelihood = pairs_of(token_means(totals, batch), batch)
        return super().sequence_loss(totals, batch, units) + likelihood.sum(likelihood.chosen) / units


@dataclass
class Both:
    """The sum of two losses of one model."""

    first: Side
    second: Side

    @property
    def model(self):
        return self.first.model

    def loss(self) -> torch.Tensor:
        return self.first.loss() + self.second.loss()


RUNS = ["sigmoid", "ipo", "kto", "reward", "sft", "simpo", "orpo"]


@pytest.mark.parametrize("kind", RUNS)
def test_twenty_steps_of_adamw_equal_trl(tmp_path, kind):
    """Both sides take the same batch at every step, with a constant rate and no clipping."""
    if kind in DPO:
        made, batch, loss = trainer("dpo", POLICY, PAIRS, tmp_path, REFERENCE, **DPO[kind][1])
        own = side(tmp_path, OBJECTIVES["dpo"](**DPO[kind][0]), pairs_in(batch), reference=REFERENCE)
    elif kind == "kto":
        made, batch, loss = trainer("kto", POLICY, REPLIES, tmp_path, REFERENCE)
        labels = [int(row["label"]) for row in REPLIES]
        units = [[sequence] for sequence in sequences_of(batch)]
        own = side(tmp_path, OBJECTIVES["kto"](), units, reference=REFERENCE, labels=labels)
    elif kind == "reward":
        policy = model(0, scores=True)
        data = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in PAIRS]
        made, batch, loss = trainer("reward", policy, data, tmp_path)
        own = side(tmp_path, OBJECTIVES["reward"](), pairs_in(batch), hf=policy)
    elif kind in ("simpo", "orpo"):
        simpo = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}
        trl_kind, options = ("cpo", simpo) if kind == "simpo" else ("orpo", {"beta": 0.1})
        made, batch, loss = trainer(trl_kind, POLICY, PAIRS, tmp_path, **options)
        chosen, rejected = of_labels(batch, "chosen"), of_labels(batch, "rejected")
        units = [list(pair) for pair in zip(chosen, rejected, strict=True)]
        if kind == "simpo":
            own = side(tmp_path, OBJECTIVES["simpo"](), units)
        else:
            odds = side(tmp_path, OddsOnly(beta=0.1), units)
            whole = [[(ids, np.arange(len(ids)) > 0)] for ids, _ in chosen]
            own = Both(odds, Side(odds.model, rows(OBJECTIVES["sft"](), whole), OBJECTIVES["sft"]()))
    else:
        data = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
        made, batch, loss = trainer("sft", POLICY, data, tmp_path)
        parts = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
        units = [[(ids[used > 0].numpy(), (labels[used > 0] != IGNORED).numpy())] for ids, labels, used in parts]
        own = side(tmp_path, OBJECTIVES["sft"](), units)
    settings = {
        "lr": 1e-3 if kind in ("sft", "orpo") else 1e-4,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }
    optimizers = [torch.optim.AdamW(net.parameters(), **settings) for net in (made.model, own.model)]
    theirs, mine = [], []
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = loss()
        expected.backward()
        theirs.append(expected.item())
        mine.append(own.loss().item())
        for optimizer in optimizers:
            optimizer.step()
    assert abs(theirs[-1] - theirs[0]) > 0.1 * abs(theirs[0])
    assert mine == pytest.approx(theirs, rel=STEPS)
