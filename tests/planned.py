"""Jobs for tests of the planner, and the planner's figures in the form that tests compare."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import batch_layouts
from kumi.plan.memory.device_memory import num_microbatches
from kumi.plan.memory.states import UnshardedBytes, rank_params, unsharded_bytes
from kumi.plan.pipeline.stages import rank_stages
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.engine import KUMI
from kumi.spec.job import Job
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS

GPU = Device("GPU", "cuda", 80 * 2**30, ("float32", "bfloat16"), (("bfloat16", 1e15),))


def job_of(model, *, seq_len=2048, sequences=64, kind="bf16", engine=KUMI, optim=None, device=GPU):
    """Return a job of `sequences` sequences per step."""
    batch = BatchSpec(seq_len, seq_len * sequences)
    return Job(model, ClusterSpec("test", device, 8), batch, PRECISIONS[kind], optim or Optim(), engine)


def share_of(job, layout, rank=0):
    """Return `layout` as a batch, and the share of the model on pipeline rank `rank`."""
    x = batch_layouts([layout])
    return x, rank_stages(job.model, x, np.array([rank]), num_microbatches(job, x), layout.stage_layers)


def gathered_of(model, layout, kind, microbatches) -> UnshardedBytes:
    """Return the transient bytes of sharded states in a step of `microbatches` microbatches, as ints."""
    job = job_of(model, sequences=layout.dp * layout.microbatch * microbatches, kind=kind)
    x, part = share_of(job, layout)
    sizes = unsharded_bytes(job, x, rank_params(job, x, part), num_microbatches(job, x))
    return UnshardedBytes(*(int(size[0]) for size in sizes))
