"""Estimated seconds of the parts of a rollout batch, beside the measured ones.

time/estimated_generate_s    generation, for the lengths of the batch before; in a run's first batch, for those that the
                             plan expects
time/estimated_score_s       reward models, for the lengths of this batch; missing without a reward model, because no
                             formula has the time of other rewards
time/estimated_log_probs_s   log-probs, for the rows of this batch
time/estimated_train_s       an update, for its rows
perf/estimated_step_s        in a step that begins a batch, the sum of all parts, where scoring is estimated to take as
                             long as all rewards took for the batch before; in other steps, the update alone

`kumi.train.refined_estimates` multiplies them by ratios of measured to estimated seconds of earlier steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kumi.plan.rollout_step import RolloutStep, rollout_step
from kumi.plan.time.generation_time import BatchLengths, expected_lengths
from kumi.rollout.collect_groups import Collected
from kumi.rollout.group import Group
from kumi.rollout.prompt_sampler import Prompt, PromptSampler
from kumi.rollout.rollout_batch import RolloutBatch
from kumi.spec.job import Job
from kumi.spec.layout import Layout


class RolloutEstimates:
    """The estimates of a run with rollouts of `job` on `layout`."""

    def __init__(self, job: Job, layout: Layout) -> None:
        assert job.rollout is not None, "only runs with rollouts generate in each step"
        self._job, self._layout = job, layout
        # The lengths of all prompts and replies of the batch before, and the seconds of its rewards.
        self._lengths, self._score_s = expected_lengths(job.rollout), 0.0
        # The estimate of the batch that began last.
        self._step: RolloutStep | None = None

    def state(self) -> dict[str, Any]:
        """Return, as JSON data, what the next batch's estimates need of the batches so far."""
        return {**asdict(self._lengths), "score_s": self._score_s}

    def restore(self, state: Mapping[str, Any] | None, batch: RolloutBatch | None) -> None:
        """Continue from `state`, and within `batch`; None if the checkpoint is not within a batch.

        Raise ValueError, KeyError or TypeError for data that `state` did not write.
        """
        if state is not None:  # checkpoints of earlier versions of kumi have none
            prompts, replies = (int(tokens) for tokens in state["prompts"]), state["replies"]
            lengths = tuple(tuple(int(tokens) for tokens in of_prompt) for of_prompt in replies)
            self._lengths, self._score_s = BatchLengths(tuple(prompts), lengths), float(state["score_s"])
        if batch is not None:
            self._step = self._step_of(batch)

    def begin(self, batch: RolloutBatch, collected: Collected, sampler: PromptSampler) -> dict[str, float]:
        """Return the estimates of the step that begins `batch`; {} if the device's speed is unknown."""
        before = rollout_step(self._job, self._layout, self._lengths)
        step = self._step = self._step_of(batch)
        if before is None or step is None:
            return {}
        expected = before.generate + (self._score_s or step.scoring) + step.log_probs + step.train[0]
        generated = [
            group
            for group in (*collected.groups, *collected.spares, *collected.dropped)
            if all(reply.version == batch.version for reply in group.replies)
        ]
        if generated:
            self._lengths = _lengths(generated, [sampler.prompt(group.prompt) for group in generated])
        self._score_s = collected.score_s
        return {
            "time/estimated_generate_s": before.generate,
            **({"time/estimated_score_s": step.scoring} if step.scoring else {}),
            "time/estimated_log_probs_s": step.log_probs,
            **self.update(0),
            "perf/estimated_step_s": expected,
        }

    def update(self, part: int) -> dict[str, float]:
        """Return the estimates of a step that trains on the part `part` of the batch that began last.

        {} if the device's speed is unknown.
        """
        if self._step is None:
            return {}
        seconds = self._step.train[part]
        return {"time/estimated_train_s": seconds, "perf/estimated_step_s": seconds}

    def _step_of(self, batch: RolloutBatch) -> RolloutStep | None:
        return rollout_step(self._job, self._layout, _lengths(batch.groups, batch.prompts))


def _lengths(groups: Sequence[Group], prompts: Sequence[Prompt]) -> BatchLengths:
    """Return the numbers of tokens of `prompts` and of the replies of `groups`; a reply has at least one token."""
    replies = tuple(tuple(max(1, len(reply.ids)) for reply in group.replies) for group in groups)
    return BatchLengths(tuple(len(prompt.ids) for prompt in prompts), replies)
