"""Memory of the reward models of a run with rollouts: their frozen weights on the layout, and a pass over replies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kumi.plan.layout_batch import Floats, LayoutBatch
from kumi.plan.memory.activations import model_activations
from kumi.plan.memory.states import num_shards, rank_params, resident_state_bytes, unsharded_bytes
from kumi.plan.pipeline.stages import rank_stages
from kumi.spec.job import Job
from kumi.spec.loss_passes import LossPasses
from kumi.spec.precision import Precision


@dataclass(frozen=True)
class RewardModelBytes:
    """Bytes of the reward models on a rank, (rows,) each.

    `weights`: weights of all reward models, resident between steps.
    `gathered`, `activations`: gathered weights and activations of the model with the largest sum while it scores.
    """

    weights: Floats
    gathered: Floats
    activations: Floats


def reward_jobs(job: Job) -> list[Job]:
    """Return a job for each reward model of `job`: a forward pass over the same sequences, in the compute dtype."""
    models = () if job.rollout is None else job.rollout.reward_models
    dtype = job.precision.compute
    precision = Precision("rewards", dtype, dtype, dtype)
    passes = LossPasses(forwards=1)
    return [
        replace(job, model=model, precision=precision, passes=passes, rollout=None, critic=None) for _, model in models
    ]


def reward_model_bytes(job: Job, layouts: LayoutBatch) -> RewardModelBytes:
    """Return the bytes of the reward models of `job`; zeros without any."""
    none = np.zeros(len(layouts))
    result = RewardModelBytes(none, none, none)
    for reward_job in reward_jobs(job):
        microbatches = np.ones(len(layouts), np.int64)
        share = rank_stages(reward_job.model, layouts, np.zeros(len(layouts), np.int64), microbatches)
        params = rank_params(reward_job, layouts, share)
        unsharded = unsharded_bytes(reward_job, layouts, params, microbatches).params
        # FSDP prefetches the next unit while a layer computes.
        gathered = unsharded + np.where(num_shards(layouts) > 1, params.largest_gathered_bytes, 0.0)
        activations = _pass_bytes(reward_job, layouts)
        larger = gathered + activations > result.gathered + result.activations
        result = RewardModelBytes(
            result.weights + resident_state_bytes(reward_job, layouts, params)["params"],
            np.where(larger, gathered, result.gathered),
            np.where(larger, activations, result.activations),
        )
    return result


def _pass_bytes(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the activation bytes of a pass without a gradient: the largest layer, and the hidden states around it."""
    of_model = model_activations(job, layouts)
    per_token = np.max([layer.none for layer in of_model.layers], axis=0) + 2 * of_model.boundary
    return np.asarray(layouts.microbatch * job.batch.seq_len * per_token)
