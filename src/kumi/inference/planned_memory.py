"""The memory that generation needs, planned before anything is loaded and compared with what this machine has free."""

from __future__ import annotations

from dataclasses import replace

import torch

from kumi.accelerator import is_gpu
from kumi.config.job_sections import ClusterSection
from kumi.config.local_machine import this_machine
from kumi.errors import FitError
from kumi.plan.inference.inference_job import InferenceJob
from kumi.plan.inference.inference_memory import InferenceMemory, inference_memory, largest_batch
from kumi.process_limits import free_memory
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.units import format_bytes


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of memory that are free on `device`; None where the system does not tell."""
    return torch.cuda.mem_get_info(device)[0] if is_gpu(device) else free_memory()


def fitting_batch(
    spec: ModelSpec,
    dtype: str,
    context: int,
    free: int | None,
    *,
    batch_size: int | None,
    most: int,
    loaded: bool = False,
) -> tuple[int, InferenceMemory]:
    """Return the number of sequences of up to `context` tokens to decode at once, and the bytes that they need.

    batch_size: the user's number; None for as many as fit, up to `most`.
    free: bytes of free memory, None if unknown.
    loaded: the weights are in memory already.

    Raise FitError if `batch_size` sequences, or a single one, do not fit; its message names the number that fits.
    """
    cluster = this_machine(ClusterSection(devices_per_node=1))
    device = replace(cluster.device, memory=free if free is not None else cluster.device.memory)
    job = InferenceJob(spec, replace(cluster, device=device), dtype, margin=0.0)
    if loaded:
        weights = inference_memory(job, Layout(), 0, 1).weights
        job = replace(job, cluster=replace(cluster, device=replace(device, memory=device.memory + weights)))
    largest = largest_batch(job, Layout(), context)
    batch = min(most, max(1, largest)) if batch_size is None else batch_size
    memory = inference_memory(job, Layout(), batch, context)
    if free is None or batch <= largest:
        return batch, memory
    remedy = (
        f"use --batch-size {largest}"
        if largest
        else "not even one sequence fits: use --dtype bfloat16, fewer --max-new-tokens, or a smaller model"
    )
    raise FitError(
        f"generation needs {format_bytes(memory.total)}: {format_bytes(memory.weights)} of weights, "
        f"{format_bytes(memory.cache)} of cache for {batch} sequences of {context} tokens, and "
        f"{format_bytes(memory.total - memory.weights - memory.cache)} for prompts and the process; "
        f"{format_bytes(device.memory)} are free; {remedy}"
    )
