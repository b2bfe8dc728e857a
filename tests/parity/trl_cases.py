"""Objectives on kumi's side and on TRL's, with the deviations of TRL put in on kumi's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text_units import TextUnits, add_gradients, add_reference, load_model, make_batch, read_units

from kumi.objectives import OBJECTIVES, Objective
from kumi.objectives.preferences import pairs_of, token_means

WORDS = ["hello", "world", "what", "is", "the", "weather", "in", "Paris", "today", "sunny", "no"]


def random_rows(kind: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows of plain text; `kind` is "pairs", "margins" (pairs with a margin), "replies" or "feedback"."""
    random = np.random.default_rng(seed)

    def words(least: int) -> str:
        return " ".join(random.choice(WORDS, random.integers(least, 6)))

    rows: list[dict[str, Any]] = []
    for number in range(count):
        row: dict[str, Any] = {"prompt": words(1)}
        for name in ("chosen", "rejected") if kind in ("pairs", "margins") else ("completion",):
            row[name] = f" {words(2)} {name[:2]}"  # never equal on both sides
        if kind == "margins":
            row["margin"] = number % 3 / 4
        if kind == "feedback":
            row["label"] = number % 4 in (0, 3)
        rows.append(row)
    return rows


def with_batch_mean(weight: float, objective: Objective) -> Objective:
    """Return `objective` with `weight` times the mean negative log-prob of all chosen tokens of a microbatch added.

    TRL means over tokens; kumi, as RPO's and CPO's authors, over pairs of means over tokens.
    """

    class BatchMean(type(objective)):  # type: ignore[misc]
        def sequence_loss(self, totals, batch, units):
            log_probs, tokens = pairs_of(totals, batch), pairs_of(batch["trained"].double(), batch)
            mean = log_probs.sum(log_probs.chosen) / tokens.sum(tokens.chosen)
            return super().sequence_loss(totals, batch, units) - weight * mean

    return BatchMean(**asdict(objective))


class OddsRatioAlone(OBJECTIVES["orpo"]):  # type: ignore[misc]
    """ORPO without its negative log-likelihood."""

    def sequence_loss(self, totals, batch, units):
        pairs = pairs_of(token_means(totals, batch), batch)
        return super().sequence_loss(totals, batch, units) + pairs.sum(pairs.chosen) / units


@dataclass(frozen=True)
class Case:
    """An objective of kumi with `options`, and that of TRL's trainer `theirs` with `their_options`."""

    kind: str
    theirs: str
    rows: str = "pairs"
    options: dict[str, Any] = field(default_factory=dict)
    their_options: dict[str, Any] = field(default_factory=dict)
    deviation: Callable[[Objective], Objective] | None = None
    rate: float = 1e-3

    @property
    def objective(self) -> Objective:
        if self.kind == "orpo":
            return OddsRatioAlone(**self.options)
        objective = OBJECTIVES[self.kind](**self.options)
        return objective if self.deviation is None else self.deviation(objective)


def _dpo(loss_type: str, rate: float = 1e-3, **options: Any) -> Case:
    ours = {"loss_type": loss_type, **options}
    smoothing = {"label_smoothing": 0.1} if loss_type == "robust" else {}
    return Case("dpo", "dpo", "pairs", {**ours, **smoothing}, {"loss_type": [loss_type], **smoothing}, rate=rate)


CASES = {
    "sft": Case("sft", "sft", "replies"),
    "sigmoid": _dpo("sigmoid"),
    "hinge": _dpo("hinge"),
    "ipo": _dpo("ipo"),
    "robust": _dpo("robust"),
    "sigmoid-mean": Case(
        "dpo", "dpo", "pairs", {"length": "mean", "beta": 5.0}, {"loss_type": ["sigmoid_norm"], "beta": 5.0}
    ),
    "apo_zero": _dpo("apo_zero"),
    "apo_down": _dpo("apo_down"),
    "sigmoid+sft": Case(
        "dpo",
        "dpo",
        "pairs",
        {},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        partial(with_batch_mean, 0.5),
    ),
    "kto": Case("kto", "kto", "feedback", {"undesirable_weight": 1.33}, {"undesirable_weight": 1.33}),
    "orpo": Case("orpo", "orpo"),
    "simpo": Case(
        "simpo", "cpo", "pairs", {}, {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}
    ),
    "cpo": Case("cpo", "cpo", "pairs", {"sft": 0.0}, {"beta": 0.1, "cpo_alpha": 1.0}, partial(with_batch_mean, 1.0)),
    "reward": Case("reward", "reward", "margins", {"center_rewards": 0.01}, {"center_rewards_coefficient": 0.01}),
}


class Ours:
    """kumi's model, with the batches of rows that it trains on."""

    def __init__(self, case: Case, folder: Path, batches: list[list[dict[str, Any]]]) -> None:
        self.case, self.objective = case, case.objective
        self.model = load_model(folder / ("reward" if case.kind == "reward" else "policy"))
        self.units = [read_units(folder / "policy", rows) for rows in batches]
        self._batches = [make_batch(units, self.objective.rows) for units in self.units]
        if self.objective.reference:
            reference = load_model(folder / "reference")
            self._batches = [add_reference(self.objective, batch, reference) for batch in self._batches]

    def add_gradients(self, number: int = 0) -> float:
        """Add the gradients of a batch, and return its loss."""
        loss = add_gradients(self.model, self.objective, self._batches[number])
        if self.case.kind == "orpo":  # TRL's likelihood is over prompts too, and a mean over the tokens of the batch
            chosen = make_batch(_chosen_texts(self.units[number]))
            loss += add_gradients(self.model, OBJECTIVES["lm"](), chosen)
        return loss

    def sequences(self, number: int = 0) -> list[tuple[list[int], list[int]]]:
        """Return the sequences of a batch in TRL's order: first sides, then second sides."""
        sides = zip(*self.units[number].sequences, strict=True)
        return [(ids.tolist(), (mask & 1).tolist()) for side in sides for ids, mask, _ in side]


def _chosen_texts(units: TextUnits) -> TextUnits:
    """Return the chosen sides, with all tokens trained."""
    records = units.records.copy()
    sequences = [[(ids, np.ones_like(mask), weights)] for (ids, mask, weights), _ in units.sequences]
    lengths = [len(ids) for [(ids, _, _)] in sequences]
    records["documents"], records["tokens"], records["trained"] = 1, lengths, lengths
    records["first_document"] = np.arange(len(records))
    return TextUnits(units.prefix, sequences, records=records)


def gradient_norm(model: torch.nn.Module) -> float:
    """Return the norm of the gradients of a model on one rank."""
    return torch.stack([x.grad.double().square().sum() for x in model.parameters()]).sum().sqrt().item()
