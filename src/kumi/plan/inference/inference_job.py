"""All inputs of a plan of generation except the layout and the batch."""

from __future__ import annotations

from dataclasses import dataclass

from kumi.plan.uncertainty.margin import memory_margin
from kumi.spec.cluster import ClusterSpec
from kumi.spec.job import Job
from kumi.spec.model import ModelSpec

# Tokens of prompts that one forward pass computes; a longer prompt is a pass of its own.
PROMPT_TOKENS = 4096


@dataclass(frozen=True)
class InferenceJob:
    """A model that generates on a cluster.

    - `compute`: dtype of activations.
    - `weights`, `cache`: dtypes of the weights and of the cache; `compute` unless they are given.
    - `graphs`: the steps are recorded CUDA graphs with fused element-wise kernels, as serving engines have; else the
      host launches every kernel, as kumi's own engine does.
    - `margin`: share of device memory that stays free.
    """

    model: ModelSpec
    cluster: ClusterSpec
    compute: str
    weights: str = ""
    cache: str = ""
    graphs: bool = False
    margin: float = 0.1

    @property
    def weight_dtype(self) -> str:
        return self.weights or self.compute

    @property
    def cache_dtype(self) -> str:
        return self.cache or self.compute


def inference_job(job: Job) -> InferenceJob:
    """Return the generation of the model of `job`, on its cluster and in its compute dtype."""
    return InferenceJob(job.model, job.cluster, job.precision.compute, margin=memory_margin(job))
