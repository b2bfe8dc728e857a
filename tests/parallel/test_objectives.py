"""Objectives, which know no layout, give the same loss, metrics and gradients on every layout as in one process, in
float64. One process is compared with the formula on the log-probs of the complete batch."""

from __future__ import annotations

from functools import cache, partial
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kumi.objectives import IGNORED, OBJECTIVES, Objective
from kumi.parallel import all_reduce_sum, build, clip_gradients
from kumi.parallel.run_microbatches import MetricSums, forward_backward
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from ranks import run_ranks
from steps import LENGTH, SEQUENCES, SPECS, VOCAB, batch, gradients, mesh_of

SEGMENTS = 4
STARTS = (0, 3, 9, 12)
ENDS = (*STARTS[1:], LENGTH)


class Coupled(Objective):
    """A loss that is not a function of sums over sequences: products of neighbouring tokens' log-probs."""

    columns: ClassVar = {"loss_weights": "token"}

    def count(self, batch):
        return batch["labels"].numel()

    def loss(self, log_probs, batch, units, sums):
        whole = sums(batch["loss_weights"] * log_probs, torch.zeros_like(batch["labels"]), 1)
        return (whole**2).sum() / units


KINDS = {
    "lm": OBJECTIVES["lm"](),
    "weighted": OBJECTIVES["sft"](),
    "coupled": Coupled(),
    "dpo": OBJECTIVES["dpo"](beta=0.5, margin=1.0, sft=0.3),
    "cdpo": OBJECTIVES["dpo"](loss_type="cdpo", label_smoothing=0.1, beta=0.5, length="mean"),
    "robust": OBJECTIVES["dpo"](loss_type="robust", label_smoothing=0.2),
    "hinge": OBJECTIVES["dpo"](loss_type="hinge", beta=0.3),
    "ipo": OBJECTIVES["dpo"](loss_type="ipo", beta=0.2),
    "apo_zero": OBJECTIVES["dpo"](loss_type="apo_zero", beta=0.5),
    "apo_down": OBJECTIVES["dpo"](loss_type="apo_down", beta=0.5),
    "kto": OBJECTIVES["kto"](beta=0.5, undesirable_weight=1.33),
    "orpo": OBJECTIVES["orpo"](beta=0.7),
    "simpo": OBJECTIVES["simpo"](sft=0.2),
    "cpo": OBJECTIVES["cpo"](beta=0.4),
}


def _columns(kind):
    """Return the batch of `steps.batch`, with the further columns that the objective of `kind` reads.

    The last pair of every third row does not exist.
    """
    random, place = torch.Generator().manual_seed(5), torch.arange(LENGTH)
    segments = sum((place >= start).long() for start in STARTS[1:]).expand(SEQUENCES, LENGTH).contiguous()
    columns = batch(0) | {"document_ids": segments.int()}
    if kind in ("lm", "weighted", "coupled"):
        weights = torch.rand(SEQUENCES, LENGTH, generator=random, dtype=torch.float64)
        return columns | ({} if kind == "lm" else {"loss_weights": weights})
    columns["labels"][:, STARTS] = columns["labels"][:, STARTS].clamp(min=0)  # each sequence has a trained token
    columns["labels"][::3, STARTS[2] :] = IGNORED
    columns |= _sequences(columns, segments, random)
    columns["margins"] = torch.rand(SEQUENCES, SEGMENTS // 2, generator=random)
    if kind == "kto":
        columns["desirable"] = torch.randint(0, 2, (SEQUENCES, SEGMENTS), generator=random, dtype=torch.int8)
        other = batch(1) | {"document_ids": segments.int()}
        other["labels"][:, STARTS] = other["labels"][:, STARTS].clamp(min=0)
        other |= _sequences(other, segments, random)
        columns |= {f"mismatched_{name}": column for name, column in other.items()}
    return columns


def _sequences(columns, segments, random):
    is_trained = (columns["labels"] != IGNORED).long()
    trained = torch.zeros(SEQUENCES, SEGMENTS, dtype=torch.int64).scatter_add(1, segments, is_trained)
    # Near the sums of a random model, so that no term of a loss is saturated.
    noise = torch.randn(SEQUENCES, SEGMENTS, generator=random, dtype=torch.float64)
    return {"segments": segments, "trained": trained, "reference": -np.log(VOCAB) * trained - 1.5 + noise}


def _step(layout, kind, family, microbatches):
    """The loss, the metrics, the norm of the gradients, and this rank's part of them."""
    mesh, objective = mesh_of(layout), KINDS[kind]
    model = build(SPECS[family], mesh, PRECISIONS["fp64"], weights=7)
    whole = _columns(kind)
    share, index = SEQUENCES // layout.dp, layout.dp_index(mesh.rank)
    mine = {name: column[index * share : (index + 1) * share].chunk(microbatches) for name, column in whole.items()}
    batches = [{name: chunks[number] for name, chunks in mine.items()} for number in range(microbatches)]
    metrics = MetricSums(objective, mesh)
    loss = forward_backward(model, mesh, objective, batches, objective.count(whole), metrics=metrics).double()
    measured = all_reduce_sum(metrics.sums, mesh).numpy()
    return all_reduce_sum(loss, mesh).item(), measured, clip_gradients(model, 1e9, mesh).item(), gradients(model, mesh)


@cache
def alone(kind, family):
    return run_ranks(1, _step, Layout(), kind, family, 1)[0]


LAYOUTS = [
    Layout(dp_replicate=2),
    *(Layout(dp_shard=2, zero=zero) for zero in (1, 2, 3)),
    Layout(tp=2, sequence_parallel=False),
    Layout(tp=2),
    Layout(cp=2),
    Layout(cp=2, context="ulysses", zero=3),
    Layout(pp=2),
    Layout(pp=2, schedule="zb-h1", recompute="full"),
    Layout(pp=2, schedule="zb-v", stages=2),
    Layout(pp=2, cp=2),
    Layout(tp=2, dp_shard=2, zero=3, recompute="selective"),
]
# Each layout with some kinds, so that each kind runs on a layout that shards tokens; the rest is exhaustive.
CORE = {(layout, kind) for layout in LAYOUTS for kind in ("weighted", "dpo")}
CORE |= {(layout, "kto") for layout in LAYOUTS if layout.cp > 1 or layout.pp > 1 or layout.zero == 3}
CORE |= {(Layout(cp=2), "coupled"), (Layout(pp=2, cp=2), "ipo"), (Layout(tp=2), "orpo"), (Layout(cp=2), "simpo")}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(
            layout, kind, marks=() if (layout, kind) in CORE else pytest.mark.exhaustive, id=f"{layout.words}-{kind}"
        )
        for layout in LAYOUTS
        for kind in KINDS
    ],
)
def test_an_objective_gives_the_same_on_every_layout(ranks, layout, kind):
    _compare(ranks, layout, kind, "llama")


@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=2, ep=2), Layout(pp=2, dp_shard=2, ep=2, zero=3)], ids=lambda layout: layout.words
)
def test_an_objective_gives_the_same_with_expert_parallelism(ranks, layout, kind):
    _compare(ranks, layout, kind, "moe")


def _compare(ranks, layout, kind, family):
    loss, metrics, norm, whole = alone(kind, family)
    by_name = {part.name: part.values for part in whole}
    for own_loss, own_metrics, own_norm, parts in ranks(layout.world_size, _step, layout, kind, family, 2):
        assert own_loss == pytest.approx(loss, rel=1e-10)
        assert own_metrics == pytest.approx(metrics, rel=1e-10)
        assert own_norm == pytest.approx(norm, rel=1e-10)
        for part in parts:
            expected = by_name[part.name]
            here = tuple(slice(first, first + size) for first, size in zip(part.start, part.values.shape, strict=True))
            assert np.abs(part.values - expected[here]).max(initial=0.0) <= 1e-10 * np.abs(expected).max(), part.name


def _log_probs(kind, prefix=""):
    """Return the log-probs of the complete batch in one process, and its columns."""
    model, columns = build(SPECS["llama"], mesh_of(Layout()), PRECISIONS["fp64"], weights=7), _columns(kind)
    inputs = {name: columns[prefix + name] for name in ("input_ids", "labels", "document_ids")}
    return model(**inputs).detach(), columns


def test_weighted_tokens_are_those_of_one_formula():
    log_probs, columns = _log_probs("weighted")
    trained = columns["labels"] != IGNORED
    weights = columns["loss_weights"][trained]
    expected = -(weights * log_probs[trained]).sum() / weights.sum()
    assert alone("weighted", "llama")[0] == pytest.approx(expected.item(), rel=1e-6)  # token weights are float32
    assert alone("weighted", "llama")[0] != pytest.approx(alone("lm", "llama")[0], rel=1e-5)


def _sums(log_probs):
    return torch.stack([log_probs[:, first:stop].sum(1) for first, stop in zip(STARTS, ENDS, strict=True)], 1)


def _pair(kind):
    """Return sums of log-probs, those minus the reference's, and lengths, of both sides of all pairs that exist."""
    log_probs, columns = _log_probs(kind)
    exist = columns["trained"].view(SEQUENCES, -1, 2)[..., 0] > 0
    totals = _sums(log_probs)
    parts = [totals, totals - columns["reference"], columns["trained"].double()]
    return *(part.view(SEQUENCES, -1, 2)[exist].T for part in parts), columns["margins"][exist]


def _expected(kind):  # the formulas of the papers, written for one pair each
    total, ahead, n, margin = _pair(kind)
    h, hbar = ahead[0] - ahead[1], ahead[0] / n[0] - ahead[1] / n[1]
    mean = total / n
    ls, s = F.logsigmoid, torch.sigmoid

    def odds(m):
        return m - torch.log1p(-m.exp())

    return {
        "dpo": lambda: -ls(0.5 * h - margin) - 0.3 * mean[0],
        "cdpo": lambda: -0.9 * ls(0.5 * hbar) - 0.1 * ls(-0.5 * hbar),
        "robust": lambda: (-0.8 * ls(0.1 * h) + 0.2 * ls(-0.1 * h)) / 0.6,
        "hinge": lambda: (1 - 0.3 * h).clamp(min=0),
        "ipo": lambda: (hbar - 2.5) ** 2,
        "apo_zero": lambda: 1 - s(0.5 * ahead[0]) + s(0.5 * ahead[1]),
        "apo_down": lambda: s(0.5 * ahead[0]) + 1 - s(0.5 * h),
        "orpo": lambda: -mean[0] - 0.7 * ls(odds(mean[0]) - odds(mean[1])),
        "simpo": lambda: -ls(2 * (mean[0] - mean[1]) - 0.5) - 0.2 * mean[0],
        "cpo": lambda: -ls(0.4 * (total[0] - total[1])) - mean[0],
    }[kind]()


PAIRS = ("dpo", "cdpo", "robust", "hinge", "ipo", "apo_zero", "apo_down", "orpo", "simpo", "cpo")


@pytest.mark.parametrize("kind", PAIRS)
def test_a_pair_has_the_loss_of_its_formula(kind):
    expected = _expected(kind)
    assert len(expected) == 20  # of 24 pairs, four do not exist
    assert alone(kind, "llama")[0] == pytest.approx(expected.mean().item(), rel=1e-12)


def test_a_reply_has_the_loss_of_its_formula():
    log_probs, columns = _log_probs("kto")
    others, _ = _log_probs("kto", "mismatched_")
    ahead = _sums(log_probs) - columns["reference"]
    exist, good = columns["trained"] > 0, columns["desirable"] == 1
    off = columns["mismatched_trained"] > 0
    z = (_sums(others) - columns["mismatched_reference"])[off].mean().clamp(min=0)
    assert z > 0
    losses = torch.where(good, 1 - torch.sigmoid(0.5 * (ahead - z)), 1.33 * (1 - torch.sigmoid(0.5 * (z - ahead))))
    loss, metrics, _, _ = alone("kto", "llama")
    assert loss == pytest.approx(losses[exist].mean().item(), rel=1e-12)
    assert metrics[4][0] / metrics[4][1] == pytest.approx(z.item(), rel=1e-12)
    assert metrics[0][0] == pytest.approx((0.5 * ahead)[exist & good].sum().item(), rel=1e-12)


@pytest.mark.parametrize("kind", [*PAIRS, "kto"])
def test_a_token_has_the_gradient_weight_of_its_sequence(kind):
    """d(loss)/d(log-prob) is the same for all trained tokens of a sequence, and that of autograd through the sums."""
    objective, columns = KINDS[kind], _columns(kind) | {"statistics": torch.tensor([3.0, 12.0], dtype=torch.float64)}
    log_probs = torch.randn(SEQUENCES, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 5
    log_probs = log_probs.masked_fill(columns["labels"] == IGNORED, 0).requires_grad_()
    loss = objective.loss(log_probs, columns, 20, lambda x, at, count: x.new_zeros(len(x), count).scatter_add(1, at, x))
    [weights] = torch.autograd.grad(loss, log_probs)
    totals = _sums(log_probs.detach())
    value = partial(objective.sequence_loss, batch=columns, units=20)
    for row, segment in ((0, 0), (1, 3), (4, 2)):
        step = torch.zeros_like(totals)
        step[row, segment] = 1e-5
        slope = (value(totals + step) - value(totals - step)).item() / 2e-5
        own = weights[row, STARTS[segment] : ENDS[segment]]
        assert own.tolist() == pytest.approx([slope] * len(own), rel=1e-6, abs=1e-9)
