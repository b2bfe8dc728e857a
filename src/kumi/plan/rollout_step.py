"""Seconds of reinforcement learning on one layout: of a rollout batch, of its log-probs, and of its updates.

    generate    replies to the prompts of a batch                                (`kumi.plan.time.generation_time`)
    scoring     forward passes of the reward models over the batch
    log_probs   forward passes of the policy, of the reference and of a critic over the batch
    train       one update: forward and backward over its rows, and the optimizer; also the update of a critic

A row of an update holds one or more sequences, end to end. The rows follow from the lengths of the sequences, as
`kumi.spec.balanced_rows` packs them. Rewards other than models are computed by programs of the user or by other
services. Their time is unknown and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from kumi.plan.layout_batch import batch_layouts
from kumi.plan.memory.scoring_memory import reward_jobs
from kumi.plan.time.generation_time import BatchLengths, expected_lengths, generates_at_known_speed, generation_time
from kumi.plan.time.step_time import step_times
from kumi.spec.balanced_rows import plan_rows
from kumi.spec.batch import BatchSpec
from kumi.spec.job import Job
from kumi.spec.layout import Layout


@dataclass(frozen=True)
class RolloutStep:
    """Estimated seconds of a rollout batch and of the updates with it.

    - `generate`, `scoring`, `log_probs`: seconds of a batch. `log_probs` includes a critic's values.
    - `train`: seconds of the update on each part of the batch, with the critic's update.
    - `passes`: how often the batch is trained on.
    - `rows`, `row_tokens`: number of rows of the first update over all ranks, and token positions of each row.
    - `reply_tokens`: tokens of all replies of a batch.
    """

    generate: float
    scoring: float
    log_probs: float
    train: tuple[float, ...]
    passes: int
    rows: int
    row_tokens: int
    reply_tokens: int

    @property
    def updates(self) -> int:
        """Updates with the batch."""
        return self.passes * len(self.train)

    @property
    def train_seconds(self) -> float:
        """Mean seconds of an update."""
        return sum(self.train) / len(self.train)

    @property
    def batch_seconds(self) -> float:
        """Seconds from one rollout batch to the next; of rewards, only reward models count."""
        return self.generate + self.scoring + self.log_probs + self.passes * sum(self.train)

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step, which is one update: `batch_seconds` divided among the updates."""
        return self.batch_seconds / self.updates

    @property
    def generation_share(self) -> float:
        """The share of `batch_seconds` in which replies are generated."""
        return self.generate / self.batch_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of replies a second while generating, over all ranks."""
        return self.reply_tokens / self.generate

    def as_dict(self) -> dict[str, Any]:
        """Return the seconds and derived figures as plain data, for --json."""
        return asdict(self) | {
            "updates": self.updates,
            "positions": self.rows * self.row_tokens,
            "train_seconds": self.train_seconds,
            "batch_seconds": self.batch_seconds,
            "step_seconds": self.step_seconds,
            "generation_share": self.generation_share,
            "tokens_per_second": self.tokens_per_second,
        }


def rollout_step(job: Job, layout: Layout, lengths: BatchLengths | None = None) -> RolloutStep | None:
    """Return the estimate of a rollout batch of `job` with these `lengths`, by default the expected ones.

    None for a run without rollouts, or if the device's speed is unknown.
    """
    spec = job.rollout
    if spec is None or not generates_at_known_speed(job):
        return None
    lengths = expected_lengths(spec) if lengths is None else lengths
    size = len(lengths.prompts) // spec.updates
    parts = [
        [prompt + reply - 1 for group, prompt, reply in lengths.sequences if first <= group < first + size]
        for first in range(0, size * spec.updates, size)
    ]
    # Updates after the first need further forward passes.
    later = replace(job, passes=replace(job.passes, forwards=job.passes.forwards + job.passes.later_forwards))
    updates = [
        _update_seconds(later if part else job, layout, tuple(positions)) for part, positions in enumerate(parts)
    ]
    rows = plan_rows(parts[0], job.batch.seq_len, layout.dp, _multiple(layout))
    return RolloutStep(
        generation_time(job, layout, lengths).seconds,
        _scoring_seconds(job, layout, lengths),
        sum(log_probs for _, log_probs in updates),
        tuple(train for train, _ in updates),
        spec.passes,
        len(rows.rows),
        rows.length,
        sum(reply for *_, reply in lengths.sequences),
    )


def _scoring_seconds(job: Job, layout: Layout, lengths: BatchLengths) -> float:
    """Return the seconds in which the reward models read all prompts with their replies."""
    positions = tuple(prompt + reply for _, prompt, reply in lengths.sequences)
    plain = replace(layout, stage_layers=(), recompute="none", recompute_layers=-1)
    return sum(_update_seconds(reward_job, plain, positions)[1] for reward_job in reward_jobs(job))


def _multiple(layout: Layout) -> int:
    """Return the number that divides the length of rows: under sequence parallelism, tp ranks split them evenly."""
    return layout.tp if layout.sequence_parallel else 1


def _update_seconds(job: Job, layout: Layout, positions: Sequence[int]) -> tuple[float, float]:
    """Return (seconds of an update, seconds of the log-probs before it) for sequences of these numbers of `positions`.

    The last microbatch of a rank may have fewer rows; it then takes a proportional part of a microbatch's time.
    """
    plan = plan_rows(positions, job.batch.seq_len, layout.dp, _multiple(layout))
    per_rank = len(plan.rows) // layout.dp
    microbatch = min(layout.microbatch, per_rank)
    whole, rest = divmod(per_rank, microbatch)
    document_span = float(np.square(positions, dtype=np.float64).sum() / sum(positions))
    update = _seconds_of_rows(job, replace(layout, microbatch=microbatch), whole, plan.length, document_span)
    if not rest:
        return update
    one_more = _seconds_of_rows(job, replace(layout, microbatch=microbatch), whole + 1, plan.length, document_span)
    share = rest / microbatch
    return update[0] + share * (one_more[0] - update[0]), update[1] + share * (one_more[1] - update[1])


def _seconds_of_rows(
    job: Job, layout: Layout, microbatches: int, length: int, document_span: float
) -> tuple[float, float]:
    """Return the seconds of an update and of log-probs, with `microbatches` of rows of `length` positions on a rank."""
    rows = microbatches * layout.microbatch * layout.dp
    update = replace(job, batch=BatchSpec(length, rows * length, min(document_span, length)))
    train = log_probs = 0.0
    for trained in (replace(update, critic=None, rollout=None), *(() if job.critic is None else (update.of_critic,))):
        ranks = np.zeros((1, 1), np.int64)
        kinds = step_times(trained, batch_layouts([layout]), ranks, np.ones((1, 1)), layout.stage_layers).kinds
        seconds = {kind: float(value[0]) for kind, value in kinds.items()}
        log_probs += seconds.pop("passes", 0.0)
        train += sum(seconds.values())
    return train, log_probs
