"""Estimated seconds of the parts of a rollout batch, beside the measured ones.

time/estimated_generate_s    for the lengths of the batch before; in a run's first batch for those of its plan
time/estimated_score_s       of reward models, for the lengths of the batch; without any, no plan knows it
time/estimated_log_probs_s   for the rows of the batch
time/estimated_train_s       of an update, for its rows
perf/estimated_step_s        their sum in a step that begins a batch, with the seconds that all rewards of the batch
                             before took; in other steps that of the update

`kumi.train.refined_estimates` refines them by what the steps before have taken.
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
        # Of the batch before: lengths of all that was generated, and the seconds of its rewards.
        self._lengths, self._score_s = expected_lengths(job.rollout), 0.0
        self._own: RolloutStep | None = None

    def state(self) -> dict[str, Any]:
        """Return, as JSON data, what the next batch's estimates need of the batches so far."""
        return {**asdict(self._lengths), "score_s": self._score_s}

    def restore(self, state: Mapping[str, Any] | None, batch: RolloutBatch | None) -> None:
        """Go on from `state`, within `batch` if there is one.

        Raise ValueError, KeyError or TypeError for data that `state` did not write.
        """
        if state is not None:  # checkpoints of earlier versions of kumi have none
            prompts, replies = (int(tokens) for tokens in state["prompts"]), state["replies"]
            own = tuple(tuple(int(tokens) for tokens in of_prompt) for of_prompt in replies)
            self._lengths, self._score_s = BatchLengths(tuple(prompts), own), float(state["score_s"])
        if batch is not None:
            self._own = self._step_of(batch)

    def begin(self, batch: RolloutBatch, collected: Collected, sampler: PromptSampler) -> dict[str, float]:
        """Return the estimates of the step that begins `batch`; {} if the device's speed is unknown."""
        before = rollout_step(self._job, self._layout, self._lengths)
        own = self._own = self._step_of(batch)
        if before is None or own is None:
            return {}
        expected = before.generate + (self._score_s or own.scoring) + own.log_probs + own.train[0]
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
            **({"time/estimated_score_s": own.scoring} if own.scoring else {}),
            "time/estimated_log_probs_s": own.log_probs,
            **self.update(0),
            "perf/estimated_step_s": expected,
        }

    def update(self, part: int) -> dict[str, float]:
        """Return the estimates of a step that trains on the part `part` of the batch that began last."""
        if self._own is None:
            return {}
        seconds = self._own.train[part]
        return {"time/estimated_train_s": seconds, "perf/estimated_step_s": seconds}

    def _step_of(self, batch: RolloutBatch) -> RolloutStep | None:
        return rollout_step(self._job, self._layout, _lengths(batch.groups, batch.prompts))


def _lengths(groups: Sequence[Group], prompts: Sequence[Prompt]) -> BatchLengths:
    """Return the tokens of `prompts` and of the replies of `groups`; an empty reply has the token that ends it."""
    replies = tuple(tuple(max(1, len(reply.ids)) for reply in group.replies) for group in groups)
    return BatchLengths(tuple(len(prompt.ids) for prompt in prompts), replies)
