"""Jobs for a planner's tests, and what `kumi.plan` says of kumi's own trainer in the shape that tests compare."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import columns
from kumi.plan.memory.device_memory import microbatches_of
from kumi.plan.memory.states import Gathered, gathered, held
from kumi.plan.pipeline.stages import share
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.engine import KUMI
from kumi.spec.job import Job
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS

GPU = Device("GPU", "cuda", 80 * 2**30, ("float32", "bfloat16"), (("bfloat16", 1e15),))


def job_of(model, *, seq_len=2048, sequences=64, kind="bf16", engine=KUMI, optim=None, device=GPU):
    """A job of `sequences` sequences a step."""
    batch = BatchSpec(seq_len, seq_len * sequences)
    return Job(model, ClusterSpec("test", device, 8), batch, PRECISIONS[kind], optim or Optim(), engine)


def share_of(job, layout, rank=0):
    """`layout` as columns, and what pipeline rank `rank` of it holds."""
    x = columns([layout])
    return x, share(job.model, x, np.array([rank]), microbatches_of(job, x), layout.stage_layers)


def gathered_of(model, layout, kind, microbatches) -> Gathered:
    """What `layout` gathers in a step of `microbatches` microbatches, as whole numbers."""
    job = job_of(model, sequences=layout.dp * layout.microbatch * microbatches, kind=kind)
    x, part = share_of(job, layout)
    found = gathered(job, x, held(job, x, part), microbatches_of(job, x))
    return Gathered(*(int(size[0]) for size in vars(found).values()))
