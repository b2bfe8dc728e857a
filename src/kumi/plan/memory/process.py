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
# tensors, and what a freed tensor leaves of a larger hole. benchmarks/estimates_cpu.py measures all three figures.
HEAP_OVERHEAD = 0.35

# What a rank adds to its interpreter beside tensors and kernels: modules, threads, buffers of the communication, and
# what Python objects take.
MODULE_BYTES = 72 * 2**20

# Bytes of oneDNN's compiled kernel for one shape of a product in 16 bits, and the products with different shapes: of
# a linear layer (output, and gradients of input and weight), and of a block of attention.
_KERNEL_BYTES, _LINEAR_PRODUCTS, _BLOCK_PRODUCTS = 0.7 * 2**20, 3, 3


def process_bytes(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the bytes that a process adds to its interpreter in training, without tensors and holes, (rows,)."""
    kernels = _KERNEL_BYTES * _kernels(job, layouts) if job.itemsize < 4 else np.zeros(len(layouts))
    return MODULE_BYTES + kernels


def _kernels(job: Job, layouts: LayoutBatch) -> Floats:
    """Return the number of kernels that oneDNN compiles for products in 16 bits, (rows,)."""
    shapes = {(op.source.size, op.target.size) for op, _ in unique_ops(job.model) if op.kind == "linear"}
    rings = np.where(layouts.context == CONTEXT.index("ring"), layouts.cp, 1)
    degrees, index = np.unique(rings, return_inverse=True)
    sizes = np.array([_block_sizes(job, int(ring)) for ring in degrees], np.float64)[index]
    return np.asarray(_LINEAR_PRODUCTS * (1 + len(shapes)) + _BLOCK_PRODUCTS * sizes)


def _block_sizes(job: Job, ring: int) -> int:
    """Return the number of sizes that blocks of attention have; 0 where PyTorch's flash kernel computes it.

    A rank of a `ring` of so many multiplies with the keys of one rank at a time.
    """
    length = job.batch.seq_len
    flash = () if job.numerics is None else job.numerics.flash
    if ring == 1 and attention_case(job.itemsize, job.attention_len) in flash:
        return 0
    return num_key_sizes(-(-length // ring))
