"""Seconds of a decode step: one forward pass with one new token of each sequence of a replica.

    t = weights + cache + communication + host

A step reads the weights and the caches once. With few sequences this reading bounds the time; with many, the matrix
products do. The embedding is a lookup, so its table is not read, unless the head is tied to it. Of routed experts only
those that a token of the batch reaches are read. A replica is a group of tp ranks; with ep > 1 the replicas of an
expert-parallel group step together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kumi.plan.inference.inference_job import InferenceJob
from kumi.plan.layout_batch import Floats, Numbers
from kumi.plan.time.collective_times import collective_seconds, small_all_reduce_seconds
from kumi.plan.time.kernel_times import matmul_seconds, peak_flops, stream_seconds
from kumi.plan.time.op_costs import MEMORY_PASSES
from kumi.spec.cache_state import CacheTensor, cache_layers
from kumi.spec.cluster import Device
from kumi.spec.layout import Layout
from kumi.spec.ledger import Op, unique_ops
from kumi.spec.model import Attention, LatentAttention, LayerSpec
from kumi.spec.op import Dim
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import DIM_TO_AXIS, shard_shape, shard_size, tp_style

# Share of a GPU's memory bandwidth at which a decode step reads weights and caches, if `Device.read` has no share for
# the dtype. Fitted to gpt-fast's table for A100 (benchmarks/decode_published.py). For a CPU, `Device.stream` is used.
READ_SHARE = 0.72
# Speed of attention's products with one query per sequence, relative to the peak; only latent attention, in which all
# heads read the same vector, has enough FLOPs for them to matter.
_QUERY_PRODUCTS = 0.35
# Kernels of an operation that `op_costs.MEMORY_PASSES` does not list.
_OP_KERNELS = 1
# Kernels of attention or a recurrence: writes to the cache, mask, products.
_ATTENTION_KERNELS = 8
# Kernels of choosing the next tokens, and of the bookkeeping between steps.
_SAMPLING_KERNELS = 30
# Host time of a kernel in kumi's engine, relative to the device's bare launch interval: modules, autograd functions,
# slices of the cache. Measured on a core of an EPYC, whose bare interval is 2.6 us (benchmarks/generate.py, "host").
# For GPUs it is an assumption: the same seconds over the 5 us of the presets.
_DISPATCH = {"cpu": 4.0, "cuda": 2.0}

# Kinds of operations that multiply with a weight matrix.
_PRODUCTS = ("linear", "router", "log_prob", "score")


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of a decode step by kind, arrays with an entry for each batch and context that was asked for.

    - `weights`: products with weights, bound by reading them or by their FLOPs.
    - `cache`: attention and recurrences, bound by reading the cache or by their FLOPs.
    - `communication`: all-reduces of tp, all-to-alls of ep.
    - `host`: launches of kernels that the device waits for.
    """

    weights: Floats
    cache: Floats
    communication: Floats
    host: Floats

    @property
    def seconds(self) -> Floats:
        """All seconds of the step."""
        return self.weights + self.cache + self.communication + self.host


def decode_step(job: InferenceJob, layout: Layout, batch: Numbers, context: Numbers) -> DecodeStep:
    """Return the seconds of a decode step with `batch` sequences per replica of `context` tokens each, on average.

    `batch` and `context` are numbers, or arrays that broadcast. Raise ConfigError if the device's speed is unknown.
    """
    batch, context = np.broadcast_arrays(np.asarray(batch, np.float64), np.asarray(context, np.float64))
    weights = weight_seconds(job, layout, batch)
    cache = cache_seconds(job, layout, batch, context)
    communication = communication_seconds(job, layout, batch)
    return DecodeStep(weights, cache, communication, _host_seconds(job, layout, weights + cache + communication))


def reading_device(job: InferenceJob) -> Device:
    """Return the device of `job`; its `stream` is the share of the bandwidth that a decode step reaches."""
    device = job.cluster.device
    default = READ_SHARE if device.is_gpu else device.stream
    return replace(device, stream=dict(device.read).get(job.weight_dtype, default))


def weight_seconds(job: InferenceJob, layout: Layout, batch: Floats) -> Floats:
    """Return the seconds in which all weights are read and multiplied with, for `batch` sequences per replica."""
    device = reading_device(job)
    total = np.zeros_like(batch)
    for op, count in unique_ops(job.model):
        if op.kind in ("embedding", "positions"):
            continue
        if op.experts:
            total += count * _expert_seconds(job, layout, device, op, batch)
        elif op.kind in _PRODUCTS:
            dtype = job.weight_dtype if op.kind == "linear" else job.compute
            inner, columns = (np.asarray(local_size(dim, layout.tp)) for dim in (op.source, op.target))
            total += count * _product_seconds(device, dtype, batch, inner, columns)
            total += count * _unpacking_seconds(job, device, op, layout)
        else:
            total += count * _read_seconds(device, _param_bytes(job, op, layout))
    return total


def _product_seconds(device: Device, dtype: str, rows: Floats, inner: Numbers, columns: Numbers) -> Floats:
    """Return the seconds of a product of `rows` tokens with a weight matrix, (rows, inner) times (inner, columns).

    A GPU computes while it reads the weights; a CPU core does both in turn.
    """
    if device.is_gpu:
        return matmul_seconds(device, dtype, rows, inner, columns)
    speed = peak_flops(device, dtype) * device.matmul_share(dtype)
    return 2 * rows * inner * columns / speed + stream_seconds(device, ITEMSIZE[dtype] * inner * columns)


def _read_seconds(device: Device, size: float) -> float:
    """Return the seconds in which `device` reads `size` bytes of its memory."""
    return float(stream_seconds(device, np.asarray(size)))


def local_size(dim: Dim, tp: int) -> int:
    """Return the size of `dim` on a tp rank."""
    return int(shard_size(dim, tp if DIM_TO_AXIS.get(dim.name) == "tp" else 1))


def _param_bytes(job: InferenceJob, op: Op, layout: Layout) -> float:
    """Return the bytes of the parameters of `op` on a rank, in the compute dtype."""
    shapes = (shard_shape(param, layout.tp, layout.ep, layout.expert_tp) for param in op.params)
    return float(sum(np.prod(shape, dtype=np.float64) for shape in shapes) * ITEMSIZE[job.compute])


def _unpacking_seconds(job: InferenceJob, device: Device, op: Op, layout: Layout) -> float:
    """Return the seconds of reading a matrix in four bits and writing it in the compute dtype for the product."""
    if not (op.params and op.params[0].quantized):
        return 0.0
    # Four bits are a quarter of a compute dtype of 16 bits.
    return _read_seconds(device, 1.25 * _param_bytes(job, op, layout))


def distinct_experts(op: Op, layout: Layout, batch: Numbers) -> Floats:
    """Return the expected number of the experts on a rank that tokens reach, if all experts are equally likely.

    Each token chooses `op.passes` of the `op.experts` experts. The tokens are the `batch` tokens of a replica, or those
    of all replicas that share the experts.
    """
    tokens = np.asarray(batch, np.float64) * layout.ep * layout.expert_tp / layout.tp
    return op.experts / layout.ep * (1 - (1 - op.passes / op.experts) ** tokens)


def _expert_seconds(job: InferenceJob, layout: Layout, device: Device, op: Op, batch: Floats) -> Floats:
    """Return the seconds of routed experts: a GPU reads their weights and multiplies at once, a CPU in turn."""
    itemsize = ITEMSIZE[job.weight_dtype if op.kind == "linear" else job.compute]
    expert_size = sum(
        float(np.prod(shard_shape(param, layout.tp, layout.ep, layout.expert_tp)[1:], dtype=np.float64))
        for param in op.params
    )
    read = stream_seconds(device, distinct_experts(op, layout, batch) * expert_size * itemsize)
    if op.kind != "linear":
        return read
    rows = batch * op.passes * layout.expert_tp / layout.tp
    speed = peak_flops(device, job.weight_dtype) * device.matmul_share(job.weight_dtype)
    compute = 2 * rows * expert_size / speed
    return np.maximum(read, compute) if device.is_gpu else read + compute


def cache_seconds(job: InferenceJob, layout: Layout, batch: Floats, context: Floats) -> Floats:
    """Return the seconds in which attention and recurrences read the cache, on a rank."""
    device, total = reading_device(job), np.zeros_like(batch)
    kinds, of_layer = job.model.unique_layers()
    caches = cache_layers(job.model)
    peak = peak_flops(device, job.compute) * _QUERY_PRODUCTS
    for kind, layer in enumerate(kinds):
        tensors = caches[of_layer.index(kind)].tensors
        moved = sum((_moved_bytes(job, tensor, layout.tp, context) for tensor in tensors), np.zeros_like(batch))
        flops = _query_flops(layer, layout.tp, context)
        seconds = np.maximum(stream_seconds(device, batch * moved), batch * flops / peak)
        total += of_layer.count(kind) * seconds
    return total


def _moved_bytes(job: InferenceJob, tensor: CacheTensor, tp: int, context: Floats) -> Any:
    """Return the bytes of `tensor` that a step reads for one sequence; a tensor that does not grow is also written."""
    size = tensor.nbytes(1, job.cache_dtype, tp)
    if not tensor.grows:
        return 2.0 * size
    return size * (context if tensor.window is None else np.minimum(context, tensor.window))


def _query_flops(layer: LayerSpec, tp: int, context: Floats) -> Any:
    """Return the FLOPs of the scores and weighted sums of one query of each head of a rank."""
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        width = 2 * attention.kv_lora_rank + attention.qk_rope_head_dim
    elif isinstance(attention, Attention):
        width = 2 * attention.head_dim
    else:
        return 0.0
    seen = context if layer.window is None else np.minimum(context, layer.window)
    return 2.0 * attention.num_attention_heads / tp * width * seen


def communication_seconds(job: InferenceJob, layout: Layout, batch: Floats) -> Floats:
    """Return the seconds of the messages of a step. They are small, so latency decides."""
    hidden = job.model.hidden_size * ITEMSIZE[job.compute] * batch
    total, group = np.zeros_like(batch), (np.asarray(layout.ep), np.asarray(layout.expert_tp))
    for op, count in unique_ops(job.model):
        if layout.tp > 1 and (op.kind == "combine" or (tp_style(op) == "row" and not op.experts)):
            total += count * small_all_reduce_seconds(job.cluster, hidden, layout.tp)
        if layout.ep > 1 and op.kind in ("dispatch", "combine"):
            sent = hidden * op.passes * layout.expert_tp / layout.tp
            total += count * collective_seconds(job.cluster, "all_to_all", sent, *group)
    return total


def _host_seconds(job: InferenceJob, layout: Layout, busy: Floats) -> Floats:
    """Return the seconds in which the device waits for the host to launch kernels.

    `busy`: the seconds that the other parts of the step take.

    A GPU waits only where it is faster than the host; on a CPU each operation takes this time in addition.
    """
    launches = sum(count * _kernels(op, layout) for op, count in unique_ops(job.model)) + _SAMPLING_KERNELS
    device = job.cluster.device
    host = launches * device.launch * _DISPATCH[device.kind]
    if device.kind == "cpu":
        return np.full_like(busy, host)
    return np.zeros_like(busy) if job.graphs else np.maximum(0.0, host - busy)


def _kernels(op: Op, layout: Layout) -> float:
    """Return the number of kernels that the host launches for `op`; an all-reduce of tp counts as one."""
    if op.kind in ("attention", "scan", "convolution"):
        return _ATTENTION_KERNELS
    if op.kind in MEMORY_PASSES:
        return MEMORY_PASSES[op.kind]["eager"][2]
    return _OP_KERNELS + (layout.tp > 1 and tp_style(op) == "row")
