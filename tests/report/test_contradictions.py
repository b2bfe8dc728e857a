"""No two sentences of a report contradict each other, for random requests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import contradictions
import pytest
from random_requests import random_reports

from kumi.plan.uncertainty.intervals import Interval
from kumi.report.brief import Line

# Each seed stands for this many requests with a plan.
EACH = 5
SEEDS = [pytest.param(1000 * at, marks=[pytest.mark.exhaustive] * (at >= 2)) for at in range(60)]


@pytest.mark.parametrize("first", SEEDS)
def test_no_sentence_contradicts_another(first):
    wrong = [(name, text) for name, made in random_reports(first, EACH) for text in contradictions.contradictions(made)]
    assert wrong == []


@cache
def real():
    """A report with runners-up and with standard layouts that fit."""
    return next(
        made
        for _, made in random_reports(0, 100)
        if made.others and any(item.fits and not item.problems for item in made.expected)
    )


def failed_checks(made):
    """The names of the checks that find contradictions."""
    return {text.split(":")[0] for text in contradictions.contradictions(made)}


def slower(made):
    """The report with a slower choice than its runner-up."""
    return replace(made, best=replace(made.best, step_seconds=2 * made.best.step_seconds), others=(made.best,))


def with_bounds(low, high):
    def change(made):
        seconds = made.best.step_seconds
        return replace(made, uncertainty=replace(made.uncertainty, time80=Interval(low * seconds, high * seconds)))

    return change


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (slower, "_order"),
        (lambda made: replace(made, fitting=made.searched + 1), "_counts"),
        (lambda made: replace(made, others=(made.best, *made.others)), "_order"),
        (with_bounds(2.0, 0.5), "_intervals"),
        (with_bounds(0.1, 0.5), "_cost"),
        (lambda made: replace(made, best=replace(made.best, peak_flops=1.0)), "_speeds"),
    ],
)
def test_a_wrong_report_is_noticed(change, check):
    assert failed_checks(real()) == set()
    assert check in failed_checks(change(real()))


@pytest.mark.parametrize(
    ("function", "sentence", "check"),
    [
        ("advice", "None of the standard layouts can run here; the chosen one can.", "_standard"),
        ("advice", "With 1 GiB more memory per device, X would take 1.00 s per step instead of 1.00 s.", "_memory"),
        ("advice", "FSDP would take 1.00 s per step instead of 2.00 s; the pinned fields rule it out.", "_standard"),
        ("advice", "The model is a LlamaForCausalLM.", "_names"),
        ("headline", "X takes 130% of the step", "_shares"),
        ("headline", "it fits with probability 100%", "_shares"),
        ("headline", "X needs -3.00 s less", "_shares"),
        ("headline", "assumed, not measured: host.nvme", "_names"),
    ],
)
def test_a_wrong_sentence_is_noticed(function, sentence, check, monkeypatch):
    made = replace(real(), pinned={})
    honest = getattr(contradictions, function)
    monkeypatch.setattr(contradictions, function, lambda report: [*honest(report), sentence])
    assert check in failed_checks(made)


@pytest.mark.parametrize(
    ("label", "text", "check"),
    [
        ("memory", "70 GiB of 80 GiB: fits, 30 GiB spare (7 GiB of it the margin); probability 90%", "_memory"),
        ("limit", "Compute-bound: forward and backward take 30% of the step.", "_limits"),
        ("nodes", "99 nodes: 0.01 ms (1.00x the speed)", "_nodes"),
        ("cost", "1B tokens take 9,999 days (1 to 2), 3 device hours", "_cost"),
        ("train", "kumi cannot train this layout (no reason)", "_advice"),
        ("runner-up", "X: 0.01 ms per step (5.0% longer), 1 GiB", "_order"),
    ],
)
def test_a_wrong_line_is_noticed(label, text, check, monkeypatch):
    lines = [line for line in contradictions.brief(real()) if line.label != label]
    monkeypatch.setattr(contradictions, "brief", lambda report: [*lines, Line(label, text)])
    assert check in failed_checks(real())
