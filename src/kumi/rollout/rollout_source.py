"""The batches of a run with rollouts: each is collected with the newest weights, and trained on for some updates.

    step            0        1        2        3
    version         0                 2                   with two updates for each batch
    batch           collect, train    collect, train

A batch is a function of the weights, of the number of its first prompt, and of the spares: groups that the batch before
collected beyond its size. A checkpoint has the spares; within a batch, it also has the batch's groups with all
log-probs. So a resumed run trains on the same batches, on any layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data.binfile import Array
from kumi.data.row_source import Batch
from kumi.errors import NothingTrainedError, RefusedError
from kumi.rollout.collect_groups import Collected, GroupCollector
from kumi.rollout.group import Group, as_array, as_text, read_group
from kumi.rollout.rollout_batch import LogProbs, RolloutBatch, RowSettings, TokenTargets, UpdateSettings
from kumi.rollout.rollout_estimates import RolloutEstimates
from kumi.rollout.rollout_history import append_history, truncate_history
from kumi.rollout.rollout_metrics import batch_metrics, critic_metrics, nothing_learned
from kumi.rollout.sample_page import write_sample_page

# The name of this module's data in a checkpoint's metadata.
STATE = "rollouts"


@dataclass(frozen=True)
class Trainer:
    """What the batches need of the trainer.

    old_log_probs, reference_log_probs, values: forward passes of the policy, of the reference model and of the critic;
        None without such a model.
    always_old: True if every update needs old log-probs, because advantages depend on them. Otherwise the first update
        with a batch that is trained in a single pass needs none: its own forward pass computes the same.
    targets: returns what the updates with a batch train each token for.
    """

    old_log_probs: LogProbs
    reference_log_probs: LogProbs | None
    always_old: bool
    values: LogProbs | None
    targets: Callable[[RolloutBatch], TokenTargets]


@dataclass(frozen=True)
class SourceSettings:
    """How a `RolloutSource` makes its batches, and what it writes.

    stop_after: the run ends after this number of updates in a row whose advantages are all 0; 0 for never.
    samples_every: number of batches from one page of samples to the next; 0 for no pages.
    decode: returns the text of token ids.
    estimates: estimates the seconds of batches.
    reward_models: the folder and the digest of each reward model by its name, for checkpoints.
    """

    updates: UpdateSettings
    rows: RowSettings
    stop_after: int
    samples_every: int
    decode: Callable[[list[int]], str]
    estimates: RolloutEstimates
    reward_models: Mapping[str, Mapping[str, str]]


class RolloutSource:
    """The batches of data-parallel rank number `rank`; a `kumi.data.BatchSource`.

    out: the run folder. saved: the metadata of the checkpoint from which the run resumes, None for a new run. Every
    rank makes a source at the same time, and asks for the same steps.
    """

    def __init__(
        self,
        collector: GroupCollector,
        trainer: Trainer,
        settings: SourceSettings,
        rank: int,
        out: Path,
        saved: Mapping[str, Any] | None,
    ) -> None:
        self._collector, self._trainer, self._settings = collector, trainer, settings
        self._rank, self._out, self._is_rank_0 = rank, out, collector.mesh.rank == 0
        self._batches, self._next_prompt, self._spares = 0, 0, list[Group]()
        self._batch: RolloutBatch | None = None
        self._targets = TokenTargets(np.zeros(0))
        # The number of updates in a row, directly before the first one of `_batch`, whose advantages are all 0.
        self._idle = 0
        self._metrics: dict[str, float] = {}
        self._notes: list[str] = []
        if saved is not None:
            self._restore(saved.get(STATE))
        if self._is_rank_0:
            truncate_history(self._out, self._batches)

    def collects(self, step: int) -> bool:
        """Return True if `at(step)` collects a batch, which may take long."""
        return not self._covers(step)

    def at(self, step: int) -> Batch:
        """Return this rank's rows of `step`, after collecting a batch if `step` begins one.

        Raise NothingTrainedError, on all ranks, if all advantages of `stop_after` updates in a row are 0.
        """
        if not self._covers(step):
            self._begin(step)
        batch = self._current
        idle, limit = self._idle_before(step + 1), self._settings.stop_after
        if limit and idle >= limit:
            raise NothingTrainedError(nothing_learned(step + 1, idle, batch))
        return batch.batch(self._part(step), self._rank, self._targets)

    def teaches(self, step: int) -> bool:
        """Return True if a token of `step` has an advantage other than 0. Its batch must have been collected."""
        return self._current.teaches(self._part(step), self._targets)

    def count_returns(self, step: int) -> int:
        """Return how many tokens of `step` have a return for the critic. Its batch must have been collected."""
        return self._current.count_returns(self._part(step), self._targets)

    def metrics(self, step: int) -> Mapping[str, float]:
        """Return the metrics of `step`: its estimates, and those of the batch that `at(step)` collected, if it did."""
        if self._current.version == step:
            return self._metrics
        return self._settings.estimates.update(self._part(step)) if self._is_rank_0 else {}

    def take_notes(self) -> list[str]:
        """Return sentences for the user since the last call, on rank 0."""
        notes, self._notes = self._notes, []
        return notes

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON data of this source for a checkpoint after `step` updates."""
        state = {
            "batches": self._batches,
            "next_prompt": self._next_prompt,
            "spares": [group.plain() for group in self._spares],
            "idle": self._idle_before(step),
            "estimates": self._settings.estimates.state(),
        }
        if self._covers(step):
            batch = self._current
            state |= {
                "version": batch.version,
                "idle_at_version": self._idle,
                "groups": [group.plain() for group in batch.groups],
                **{name: None if values is None else as_text(values) for name, values in _passes(batch).items()},
            }
        return {STATE: state}

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of batches and prompts so far, by their names."""
        return {"rollout batches": self._batches, "prompts": self._next_prompt}

    @property
    def reward_models(self) -> Mapping[str, Mapping[str, str]]:
        """The folder and the digest of each reward model, by name."""
        return self._settings.reward_models

    def close(self) -> None:
        """End the engine."""
        self._collector.engine.close()

    @property
    def _current(self) -> RolloutBatch:
        assert self._batch is not None, "a batch was collected or restored before"
        return self._batch

    def _covers(self, step: int) -> bool:
        """Return True if `step` is an update with the batch that was collected last."""
        batch = self._batch
        return batch is not None and 0 <= step - batch.version < batch.settings.steps

    def _part(self, step: int) -> int:
        """Return the part of the batch on which `step` trains."""
        return (step - self._current.version) % self._settings.updates.updates

    def _idle_before(self, step: int) -> int:
        """Return the number of updates in a row, directly before `step`, whose advantages are all 0."""
        if self._batch is None:
            return self._idle
        idle = self._idle
        for earlier in range(self._batch.version, min(step, self._batch.version + self._batch.settings.steps)):
            idle = 0 if self.teaches(earlier) else idle + 1
        return idle

    def _begin(self, version: int) -> None:
        """Collect the batch that begins at step `version`, and compute all that its updates need."""
        idle = self._idle_before(version)
        collected = self._collector.collect(version, self._next_prompt, self._spares)
        started = time.perf_counter()
        batch = self._complete(self._new_batch(version, collected.groups))
        log_probs_s = time.perf_counter() - started
        self._batch, self._idle = batch, idle
        self._targets = self._trainer.targets(batch)
        self._next_prompt, self._spares = collected.next_prompt, collected.spares
        self._metrics = batch_metrics(batch, collected, log_probs_s) | critic_metrics(batch, self._targets)
        if self._is_rank_0:
            self._metrics |= self._settings.estimates.begin(batch, collected, self._collector.sampler)
        self._notes += collected.notes
        if self._is_rank_0:
            self._write(batch, collected)
        self._batches += 1

    def _new_batch(self, version: int, groups: list[Group]) -> RolloutBatch:
        prompts = [self._collector.sampler.prompt(group.prompt) for group in groups]
        return RolloutBatch(version, groups, prompts, self._settings.updates, self._settings.rows)

    def _complete(self, batch: RolloutBatch) -> RolloutBatch:
        """Return `batch` with the log-probs and values of the trainer's models that its updates need."""
        trainer, inputs = self._trainer, (batch.sequences, batch.plans)
        old = self._old_log_probs(batch)
        reference = None if trainer.reference_log_probs is None else trainer.reference_log_probs(*inputs)
        values = None if trainer.values is None else trainer.values(*inputs)
        return replace(batch, old=old, reference=reference, values=values)

    def _old_log_probs(self, batch: RolloutBatch) -> Array | None:
        """Return the old log-probs for the updates with `batch`; nan at tokens of an update that needs none.

        Return None if no update needs any.
        """
        compute = self._trainer.old_log_probs
        if self._trainer.always_old or batch.settings.passes > 1:
            return compute(batch.sequences, batch.plans)
        if batch.settings.updates == 1:
            return None
        old = compute(batch.sequences, batch.plans[1:])
        old[batch.token_places(0)] = np.nan
        return old

    def _write(self, batch: RolloutBatch, collected: Collected) -> None:
        """Write the batch's lines of the history, and its page of samples if one is due."""
        number, accepted = self._batches, list(zip(batch.groups, batch.prompts, strict=True))
        dropped = [(group, self._collector.sampler.prompt(group.prompt)) for group in collected.dropped]
        for groups, is_accepted in ((accepted, True), (dropped, False)):
            append_history(self._out, number, batch.version, groups, accepted=is_accepted)
        every = self._settings.samples_every
        if every and number % every == 0:
            write_sample_page(self._out, batch, self._settings.decode)

    def _restore(self, state: Any) -> None:
        """Take over the `state` of a checkpoint. Raise RefusedError if it is damaged or missing."""
        try:
            self._batches, self._next_prompt = int(state["batches"]), int(state["next_prompt"])
            self._spares, self._idle = [read_group(group) for group in state["spares"]], int(state["idle"])
            if "groups" not in state:
                self._settings.estimates.restore(state.get("estimates"), None)
                return
            batch = self._new_batch(int(state["version"]), [read_group(group) for group in state["groups"]])
            self._idle = int(state["idle_at_version"])
            # Earlier versions of kumi had no critics.
            texts = {name: state.get(name) for name in ("old", "reference", "values")}
            arrays = {name: None if text is None else as_array(text) for name, text in texts.items()}
            for name, array in arrays.items():
                if array is not None and len(array) != batch.tokens:
                    raise ValueError(f"they have {batch.tokens} tokens, but {len(array)} numbers in {name!r}")
            if (arrays["values"] is None) != (self._trainer.values is None):
                has_values = arrays["values"] is not None
                raise ValueError(
                    "they have values of a critic, but the run trains none"
                    if has_values
                    else "they have no values of a critic, but the run trains one"
                )
            self._settings.estimates.restore(state.get("estimates"), batch)
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError(
                f"{self._out}: the rollouts in the last checkpoint are damaged or missing ({error}); remove that "
                f"checkpoint, or start a new run in another train.out"
            ) from None
        self._batch = replace(batch, old=arrays["old"], reference=arrays["reference"], values=arrays["values"])
        self._targets = self._trainer.targets(self._batch)


def _passes(batch: RolloutBatch) -> dict[str, Array | None]:
    """Return the results of the passes of the trainer's models over `batch`, by their names in a checkpoint."""
    return {"old": batch.old, "reference": batch.reference, "values": batch.values}
