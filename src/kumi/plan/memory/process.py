"""Memory of a process that trains on a CPU, beyond its tensors: compiled kernels, modules, and holes in the heap."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import Floats, LayoutBatch
from kumi.spec.attention_blocks import num_key_sizes
from kumi.spec.job import Job
from kumi.spec.layout import CONTEXT
from kumi.spec.ledger import unique_ops
from kumi.spec.numerics import attention_case

# Memory that glibc's heap holds beyond the allocated memory, as a share of transient memory: holes between live
# tensors, and the rest of a hole that a smaller tensor has filled. benchmarks/estimates_cpu.py compares the estimates
# that follow from this figure and the next two with measured runs.
HEAP_OVERHEAD = 0.35

# Bytes that a rank adds to its interpreter beside tensors and kernels: modules, threads, communication buffers, and
# Python objects.
MODULE_BYTES = 72 * 2**20

# Bytes of the kernel that oneDNN compiles for one shape of a product in 16 bits.
_KERNEL_BYTES = 0.7 * 2**20
# Products of a linear layer with shapes of their own: the output, and the gradients of the input and of the weight.
_LINEAR_PRODUCTS = 3
# Products of a block of attention with shapes of their own.
_BLOCK_PRODUCTS = 3


def process_bytes(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the bytes that a process adds to its interpreter in training, without tensors and holes, (rows,)."""
    kernels = _KERNEL_BYTES * _num_kernels(job, layouts) if job.itemsize < 4 else np.zeros(len(layouts))
    return MODULE_BYTES + kernels


def _num_kernels(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the number of kernels that oneDNN compiles for products in 16 bits, (rows,)."""
    shapes = {(op.source.size, op.target.size) for op, _ in unique_ops(job.model) if op.kind == "linear"}
    rings = np.where(layouts.context == CONTEXT.index("ring"), layouts.cp, 1)
    degrees, index = np.unique(rings, return_inverse=True)
    sizes = np.array([_num_block_sizes(job, int(ring)) for ring in degrees], np.float64)[index]
    # The head counts as one more linear layer.
    return np.asarray(_LINEAR_PRODUCTS * (1 + len(shapes)) + _BLOCK_PRODUCTS * sizes)


def _num_block_sizes(job: Job, ring: int) -> int:
    """Return the number of sizes of key blocks in attention; 0 where PyTorch's flash kernel computes attention.

    In ring attention over `ring` ranks, a rank multiplies with the keys of one rank at a time.
    """
    length = job.batch.seq_len
    flash = () if job.numerics is None else job.numerics.flash
    if ring == 1 and attention_case(job.itemsize, job.attention_len) in flash:
        return 0
    return num_key_sizes(-(-length // ring))
