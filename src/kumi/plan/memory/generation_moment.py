"""What a rank of a run with rollouts has in memory while it generates, beside the states of training.

gathered     if ZeRO shards the weights: all weights that a rank has under tp and ep, in the compute dtype
weights      on a CPU: the packed copies of float32 matrices that make products of few rows fast
activations  the activations of the largest pass over prompts, and the logits of the slots
cache        the caches of all slots, each as long as the longest prompt with the longest reply

A slot is a place for one of the sequences that a rank generates at once.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kumi.plan.inference.inference_job import InferenceJob, inference_job
from kumi.plan.inference.inference_memory import packed_bytes, workspace_bytes
from kumi.plan.layout_batch import Floats, LayoutBatch
from kumi.plan.memory.states import RankParams, num_shards
from kumi.plan.unique_rows import unique_rows
from kumi.spec.cache_state import cache_bytes
from kumi.spec.job import Job
from kumi.spec.layout import Layout

_KINDS = ("weights", "activations", "cache")


def generation_kinds(job: Job, layouts: LayoutBatch, params: RankParams) -> dict[str, Floats]:
    """Return the bytes by kind while the rollouts of `job` are generated, without states, (rows,) each."""
    assert job.rollout is not None, "only runs with rollouts generate in each step"
    generation = inference_job(job)
    first, index = unique_rows(layouts.tp, layouts.ep, layouts.expert_tp, layouts.sequence_parallel, layouts.dp)
    sizes = []
    for row in first.tolist():
        layout = layouts.row(row)
        shards = Layout(tp=layout.tp, ep=layout.ep, expert_tp=layout.expert_tp)
        sizes.append(_sizes(generation, shards, job.rollout.rank_slots(layout), job.rollout.context))
    columns = np.array(sizes, np.float64).reshape(-1, len(_KINDS))[index].T
    gathered = np.where(num_shards(layouts) > 1, params.total.gathered_bytes, 0.0)
    return {"gathered": gathered, **dict(zip(_KINDS, columns, strict=True))}


@lru_cache(maxsize=4096)
def _sizes(job: InferenceJob, shards: Layout, slots: int, context: int) -> tuple[float, ...]:
    """Return the bytes of `_KINDS` of a rank with the tp, ep and expert_tp of `shards`."""
    cache = cache_bytes(job.model, slots, context, job.cache_dtype, shards.tp)
    return packed_bytes(job, shards), workspace_bytes(job, shards, slots, context), cache
