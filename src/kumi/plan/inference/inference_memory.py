"""Device memory of generation in bytes: weights, cache, and the largest forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kumi.plan.inference.decode_step import local_size
from kumi.plan.inference.inference_job import PROMPT_TOKENS, InferenceJob
from kumi.plan.memory.process import HEAP_OVERHEAD, MODULE_BYTES
from kumi.spec.cache_state import cache_bytes, context_that_fits, sequences_that_fit
from kumi.spec.layout import Layout
from kumi.spec.ledger import Op, buffers, head_ops, ops, unique_layer_ops
from kumi.spec.lora import NF4_BLOCK, NF4_BLOCK_BYTES
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import shard_shape

# Elements per token that a block needs for the residual stream and its normed copy, as a multiple of the hidden size.
_STREAMS = 3
# Float32 copies of the logits while the next tokens are chosen: logits, probabilities, their sorted order.
_LOGIT_COPIES = 3


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes of a device in generation.

    - `weights`: parameters and buffers, and the copy that kumi's engine packs of float32 matrices on a CPU.
    - `cache`: caches of all sequences of a replica.
    - `workspace`: activations of the largest forward pass over prompts, and logits.
    - `reserved`: libraries, and holes in the heap of a CPU process.
    """

    weights: int
    cache: int
    workspace: int
    reserved: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace + self.reserved


def inference_memory(job: InferenceJob, layout: Layout, batch: int, context: int) -> InferenceMemory:
    """Return the bytes of a device that generates `batch` sequences per replica of up to `context` tokens each."""
    workspace = workspace_bytes(job, layout, batch, context)
    return InferenceMemory(
        weight_bytes(job, layout) + packed_bytes(job, layout),
        cache_bytes(job.model, batch, context, job.cache_dtype, layout.tp),
        workspace,
        _reserved(job, workspace),
    )


def workspace_bytes(job: InferenceJob, layout: Layout, batch: int, context: int) -> int:
    """Return the bytes of the largest forward pass over prompts, and of the logits of `batch` sequences."""
    return _prompt_bytes(job, layout, context) + batch * _logit_bytes(job, layout)


def usable_bytes(job: InferenceJob) -> int:
    """Return the bytes of a device that generation may fill: all but the margin."""
    return int((1 - job.margin) * job.cluster.device.memory)


def largest_batch(job: InferenceJob, layout: Layout, context: int) -> int:
    """Return the largest number of sequences per replica of up to `context` tokens that fit; 0 if not a single one."""
    free = usable_bytes(job) - inference_memory(job, layout, 0, context).total
    each = cache_bytes(job.model, 1, context, job.cache_dtype, layout.tp)
    most = sequences_that_fit(job.model, free, context, job.cache_dtype, layout.tp)
    # A sequence needs memory for its logits as well.
    logits = inference_memory(job, layout, 1, context).total - inference_memory(job, layout, 0, context).total - each
    return min(most, max(0, free) // (each + logits))


def longest_context(job: InferenceJob, layout: Layout, batch: int) -> int:
    """Return the largest number of tokens of each of `batch` sequences per replica that fit; 0 if not one fits."""
    free = usable_bytes(job) - inference_memory(job, layout, batch, 0).total
    return context_that_fits(job.model, free, batch, job.cache_dtype, layout.tp)


def weight_bytes(job: InferenceJob, layout: Layout) -> int:
    """Return the bytes of parameters and buffers on a rank; buffers are in float32."""
    return sum(_param_bytes(buffer, "float32", layout) for buffer in buffers(job.model)) + sum(
        _op_bytes(job, op, layout) for op in ops(job.model)
    )


def packed_bytes(job: InferenceJob, layout: Layout) -> int:
    """Return the bytes of the copies of matrices that `kumi.nn.packed_products` packs in kumi's engine on a CPU.

    It packs float32 matrices, but neither experts nor quantized matrices.
    """
    if job.cluster.device.kind != "cpu" or job.compute != "float32" or job.graphs:
        return 0
    matrices = (op for op in ops(job.model) if op.kind in ("linear", "log_prob") and not op.experts)
    return sum(
        ITEMSIZE["float32"] * local_size(op.source, layout.tp) * local_size(op.target, layout.tp)
        for op in matrices
        if not any(param.quantized for param in op.params)
    )


def _op_bytes(job: InferenceJob, op: Op, layout: Layout) -> int:
    dtype = job.weight_dtype if op.kind == "linear" else job.compute
    return sum(_param_bytes(param, dtype, layout) for param in op.params)


def _param_bytes(param: Param, dtype: str, layout: Layout) -> int:
    """Return the bytes of `param` on a rank in `dtype`, or in blocks of four-bit numbers if it is quantized."""
    size = int(prod(shard_shape(param, layout.tp, layout.ep, layout.expert_tp)))
    return -(-size // NF4_BLOCK) * NF4_BLOCK_BYTES if param.quantized else size * ITEMSIZE[dtype]


def _prompt_bytes(job: InferenceJob, layout: Layout, context: int) -> int:
    """Return the bytes of the activations of a pass over prompts: the residual stream and the outputs of a block."""
    tokens = max(PROMPT_TOKENS, context)
    widest = max(
        max(_block_width(layer, layout, in_mlp=in_mlp) for in_mlp in (False, True))
        for layer in unique_layer_ops(job.model)
    )
    return int(tokens * (_STREAMS * job.model.hidden_size + widest) * ITEMSIZE[job.compute])


def _block_width(layer: tuple[Op, ...], layout: Layout, *, in_mlp: bool) -> float:
    """Return the elements per token of the outputs of the linear layers and gates of attention, or of the mlp."""
    return sum(
        (op.passes * op.target.size / layout.expert_tp if op.experts else local_size(op.target, layout.tp))
        for op in layer
        if op.kind in ("linear", "gate", "activation", "attention", "scan") and (".mlp." in op.name) == in_mlp
    )


def _logit_bytes(job: InferenceJob, layout: Layout) -> int:
    """Return the bytes of the logits of one sequence."""
    return _LOGIT_COPIES * 4 * local_size(head_ops(job.model)[-1].target, layout.tp)


def _reserved(job: InferenceJob, workspace: int) -> int:
    device = job.cluster.device
    return MODULE_BYTES + int(HEAP_OVERHEAD * workspace) if device.kind == "cpu" else device.reserved
