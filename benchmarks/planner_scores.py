"""Scores of cases, by source: errors of predicted step times and memory, and of predictions that a layout fits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from planner_defaults import reading_of
from planner_jobs import Case
from planner_metrics import (
    constant_of_others,
    grouped,
    mean_abs_error,
    one_constant,
    signed_error,
    spearman,
    top1_regrets,
)
from planner_models import parameters

from kumi.plan.estimate import estimate_many, memory_by_rank
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.memory.device_memory import memory_reading, usable_memory
from kumi.plan.time.step_time import step_times
from kumi.spec.job import Job
from kumi.spec.layout import Layout

Floats = NDArray[np.float64]
# Rows of the nanotron grid below this many tokens/s/GPU differ up to fivefold when they are repeated.
LEAST_TOKENS_PER_S = 200.0
# Sets whose slow rows are noise.
NOISY = ("nano",)
# FLOPs of a case that one constant may count: with those computed again, or of the model alone.
FLOPS = ("flops", "model_flops")
# Notes of layouts that ran out of memory; other failures may have had other reasons.
HARD = r"\boom\b|out of memory"

# How far over a device's memory an estimate may be of a run that is known to have fitted.
TOLERANCE = 1.15
IMPOSSIBLE = "layout: as printed, no GPU could hold the weights; the table leaves the layout out"

Estimator = Callable[[Job, Sequence[Layout]], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Scored:
    """Cases with the seconds and bytes that are predicted for them, (rows,) each.

    `others`: seconds that one constant of the other experiments predicts, of all FLOPs and of the model's, (2, rows);
    NaN where there is none.
    """

    cases: tuple[Case, ...]
    seconds: Floats
    memory: Floats
    others: Floats

    def where(self, mask: Sequence[bool]) -> Scored:
        index = np.flatnonzero(np.asarray(mask, bool))
        cases = tuple(self.cases[i] for i in index)
        return Scored(cases, self.seconds[index], self.memory[index], self.others[:, index])

    def with_others(self, experiments: Mapping[str, str]) -> Scored:
        """The same with `others`, from the experiment of every run by its id."""
        index = np.flatnonzero([case.seconds is not None and noticed(case) for case in self.cases])
        timed = [self.cases[i] for i in index]
        others = self.others.copy()
        measured = np.array([case.seconds for case in timed])
        peaks = np.array([case.job.cluster.device.peak_flops(case.job.precision.matmul_dtype) for case in timed])
        devices = [(case.job.cluster.device.name, case.job.precision.kind) for case in timed]
        names = [experiments[case.run.id] for case in timed]
        for row, name in enumerate(FLOPS):
            flops = np.array([getattr(case, name) / case.layout.world_size for case in timed])
            others[row, index] = constant_of_others(flops, measured, peaks, devices, names)
        return replace(self, others=others)

    def __len__(self) -> int:
        return len(self.cases)


def planner(job: Job, layouts: Sequence[Layout]) -> tuple[Floats, Floats]:
    """Seconds of a step and bytes of the fullest rank that kumi's planner estimates."""
    seconds, memory = np.empty(len(layouts)), np.empty(len(layouts))
    for members in grouped([layout.stage_layers for layout in layouts], 1):
        some = [layouts[i] for i in members]
        if not some[0].stage_layers:
            estimates = estimate_many(job, some)
            seconds[members], memory[members] = estimates.seconds, estimates.memory
            continue
        x, ranks = batch_layouts(some), np.repeat(np.arange(some[0].pp)[:, None], len(some), axis=1)
        seconds[members] = step_times(job, x, ranks, np.ones(ranks.shape), some[0].stage_layers).seconds
        device_memory = memory_by_rank(job, x, ranks, some[0].stage_layers)
        memory[members] = np.sum(list(device_memory.values()), axis=0).max(axis=0)
    return seconds, memory


def predict(cases: Sequence[Case], estimator: Estimator = planner) -> Scored:
    """What `estimator` says of `cases`, asked once for every job."""
    seconds, memory = np.empty(len(cases)), np.empty(len(cases))
    for members in by_job(cases):
        seconds[members], memory[members] = estimator(cases[members[0]].job, [cases[i].layout for i in members])
    return Scored(tuple(cases), seconds, memory, np.full((len(FLOPS), len(cases)), np.nan))


def by_job(cases: Sequence[Case]) -> list[list[int]]:
    """Positions of the cases of every job."""
    groups: dict[tuple, list[int]] = {}
    for position, case in enumerate(cases):
        job = case.job
        key = (id(job.model), job.cluster, job.batch, job.precision, job.engine)
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def complete(cases: Sequence[Case], estimator: Estimator = planner) -> tuple[list[Case], list[tuple[str, str]]]:
    """`cases`, those that leave microbatch or recomputation open with the first of their choices that fits; and
    (source, reason) of those that are refused, as what is said of them cannot have run."""
    completed = list(cases)
    for members in by_job(cases):
        tries = [(i, case) for i in members for case in (cases[i].choosing(*one) for one in cases[i].choices)]
        if not tries:
            continue
        job = cases[members[0]].job
        needs = estimator(job, [case.layout for _, case in tries])[1]
        for (i, case), size in reversed(list(zip(tries, needs))):
            if size <= TOLERANCE * job.cluster.device.memory or completed[i] is cases[i]:
                completed[i] = case
    wrong = [impossible(case) for case in completed]
    refused = [(case.run.source, IMPOSSIBLE) for case, bad in zip(completed, wrong) if bad]
    return [case for case, bad in zip(completed, wrong) if not bad], refused


def impossible(case: Case) -> bool:
    """Whether the weights that a rank would have to hold whole, in two bytes each, exceed its memory."""
    layout = case.layout
    parts = layout.pp * layout.tp * layout.ep * (layout.dp_shard * layout.cp if layout.zero == 3 else 1)
    return case.seconds is not None and 2 * parameters(case.job.model) / parts > case.job.cluster.device.memory


def sources_of(scored: Scored) -> dict[str, Scored]:
    """`scored` by the set that each run belongs to, in order of appearance."""
    names = dict.fromkeys(case.run.source for case in scored.cases)
    return {name: scored.where([case.run.source == name for case in scored.cases]) for name in names}


def noticed(case: Case) -> bool:
    """Whether a run's time says something: false for the slow rows of a noisy grid."""
    speed = case.run.tokens_per_s_per_gpu
    return case.run.source not in NOISY or speed is None or speed >= LEAST_TOKENS_PER_S


def choice(case: Case) -> tuple:
    """What runs have in common whose layouts a planner chooses between: model, GPUs, sequences, precision, batch."""
    run, job = case.run, case.job
    return (run.source, run.model, run.layers, run.gpu, case.layout.world_size, job.batch, job.precision.kind)


def time_scores(scored: Scored) -> dict[str, float | int | None]:
    """Errors of step times, the one constant beside them, and how well layouts are ranked.

    Errors and the constant are over rows of a stated or derived time. Ranking is within `choice`, among layouts: runs
    of the same one are repeats, whose mean counts.
    """
    scored = scored.where([case.seconds is not None and noticed(case) for case in scored.cases])
    if not len(scored):
        return {"time_rows": 0}
    measured = np.array([case.seconds for case in scored.cases])
    repeats = grouped([(choice(c), c.layout, c.job.engine, c.job.cluster) for c in scored.cases], 1)
    ours, theirs = (np.array([values[same].mean() for same in repeats]) for values in (scored.seconds, measured))
    choices = [choice(scored.cases[same[0]]) for same in repeats]
    rho, rho_rows = spearman(ours, theirs, choices)
    regrets = top1_regrets(ours, theirs, choices)
    return {
        "time_rows": len(scored),
        "time_mean_abs_error": mean_abs_error(scored.seconds, measured),
        "time_signed_error": signed_error(scored.seconds, measured),
        "one_constant_mean_abs_error": min(simplest(scored, measured, name) for name in FLOPS),
        "others_constant_rows": int(np.sum(np.isfinite(scored.others[0]))),
        "others_constant_mean_abs_error": constant_error(scored.others, measured),
        "spearman": rho,
        "spearman_rows": rho_rows,
        "top1_regret": float(np.mean(regrets)) if len(regrets) else None,
        "top1_regret_median": float(np.median(regrets)) if len(regrets) else None,
        "top1_regret_groups": len(regrets),
    }


def constant_error(others: Floats, measured: Floats) -> float | None:
    """Error of the constant of other experiments, of all FLOPs or of the model's, whichever is better; None without
    one."""
    given = np.isfinite(others[0])
    return min(mean_abs_error(row[given], measured[given]) for row in others) if given.any() else None


def simplest(scored: Scored, measured: Floats, name: str) -> float:
    """Error of one constant for each source, device and precision: their median FLOP/s, of all FLOPs ("flops") or those
    of the model alone ("model_flops")."""
    flops = np.array([getattr(case, name) / case.layout.world_size for case in scored.cases])
    keys = [(c.run.source, c.job.cluster.device.name, c.job.precision.kind) for c in scored.cases]
    return mean_abs_error(one_constant(flops, measured, keys), measured)


def predicted_memory(scored: Scored) -> Floats:
    """Predicted bytes as each run's were read: all of the device's, or only what PyTorch's allocator holds, which is
    what runs that do not say are taken to mean."""
    predictions = [
        memory_reading(case.job, case.layout, reading.tool, reading.pp_rank)
        if reading.tool
        else size - case.job.cluster.device.reserved
        for case, size, reading in zip(scored.cases, scored.memory, map(reading_of, (c.run for c in scored.cases)))
    ]
    return np.array(predictions)


def memory_scores(scored: Scored) -> dict[str, float | int | None]:
    """Errors of peak memory: over runs whose source says how it was read, and over all others."""
    scores: dict[str, float | int | None] = {}
    for prefix, stated in (("", True), ("unstated_", False)):
        some = scored.where([c.run.memory is not None and bool(reading_of(c.run).tool) == stated for c in scored.cases])
        scores[f"{prefix}memory_rows"] = len(some)
        if len(some):
            measured = np.array([case.run.memory for case in some.cases])
            predicted = predicted_memory(some)
            scores[f"{prefix}memory_mean_abs_error"] = mean_abs_error(predicted, measured)
            scores[f"{prefix}memory_signed_error"] = signed_error(predicted, measured)
    return scores


def fits(scored: Scored) -> NDArray[np.bool_]:
    return np.array([size <= usable_memory(c.job) for size, c in zip(scored.memory, scored.cases)], bool)


def known_to_fit(ran: Scored) -> Scored:
    """`ran` with the least memory that is in keeping with what its tables say: those that leave recomputation out may
    have had all of it."""
    silent = [i for i, case in enumerate(ran.cases) if not case.run.recompute]
    least = predict([ran.cases[i].choosing(ran.cases[i].layout.microbatch, "full") for i in silent])
    memory = ran.memory.copy()
    memory[silent] = np.minimum(memory[silent], least.memory)
    return replace(ran, memory=memory)


def is_hard(case: Case) -> bool:
    """Whether a failed run is known to have run out of memory."""
    return re.search(HARD, case.run.text) is not None and "crashed or" not in case.run.text


def fit_scores(ran: Scored, failed: Scored) -> dict[str, float | int | None]:
    """Of the layouts that ran, the share said to fit, as far as is known of them; of those that ran out of memory, and
    of those that failed for that reason or another, the share said not to."""
    hard = failed.where([is_hard(case) for case in failed.cases])
    soft = failed.where([not is_hard(case) for case in failed.cases])
    scores: dict[str, float | int | None] = {"fits_rows": len(ran), "oom_rows": len(hard), "soft_oom_rows": len(soft)}
    for name, some, value in (
        ("fits_recall", known_to_fit(ran), True),
        ("oom_recall", hard, False),
        ("soft_oom_recall", soft, False),
    ):
        scores[name] = float(np.mean(fits(some) == value)) if len(some) else None
    return scores


def reasons(refused: Sequence[tuple[str, str]]) -> dict[str, dict[str, int]]:
    """How many rows of each source were not used, by reason."""
    unused: dict[str, Counter[str]] = {}
    for source, reason in refused:
        unused.setdefault(source, Counter())[reason] += 1
    return {source: dict(counts.most_common()) for source, counts in unused.items()}
