"""How many bytes of device memory a rank needs, by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kumi.plan.types import MemoryEstimate
from kumi.spec.batch import BatchSpec
from kumi.spec.layout import Layout
from kumi.spec.ledger import Op, layer_ops, logit_chunk, ops
from kumi.spec.model import ModelSpec
from kumi.spec.optim import Optim
from kumi.spec.precision import ITEMSIZE, Precision
from kumi.spec.sharding import gathered_bytes, state_bytes

# What `recompute = "selective"` keeps: results that took a matrix product. The rest is cheap to make again.
KEPT = ("linear", "attention")


def estimate_memory(
    model: ModelSpec, layout: Layout, batch: BatchSpec, precision: Precision, optim: Optim, device_kind: str
) -> MemoryEstimate:
    """The estimate for rank 0, which holds the largest shards. `device_kind` is "cpu" or "cuda"."""
    states = state_bytes(model, layout, 0, precision, optim)
    tokens = layout.microbatch * batch.seq_len
    chunk = min(tokens, logit_chunk(model.vocab_size, device_kind))
    head_gradient = ITEMSIZE["float32"] * model.vocab_size * model.hidden_size
    return MemoryEstimate(
        states.params,
        states.grads,
        states.optimizer,
        gathered_bytes(model, layout, precision, batch.microbatches(layout)).total,
        _weight_copies(model, layout, precision),
        kept_bytes(model, layout, precision, tokens) + recomputed_bytes(model, layout, precision, tokens),
        2 * ITEMSIZE["float32"] * chunk * model.vocab_size + head_gradient,
    )


def _weight_copies(model: ModelSpec, layout: Layout, precision: Precision) -> int:
    """Bytes of weights cast where they are used and kept for the backward; of one layer, where that is recomputed.

    Sharded weights are gathered in the compute dtype already.
    """
    if precision.compute == precision.param or layout.zero > 0:
        return 0
    layers = [
        sum(param.numel for op in layer_ops(model, index) for param in op.params if op.kind == "linear")
        for index in range(model.num_hidden_layers)
    ]
    return ITEMSIZE[precision.compute] * (sum(layers) if layout.recompute == "none" else max(layers))


def kept_bytes(model: ModelSpec, layout: Layout, precision: Precision, tokens: int) -> int:
    """Bytes of activations that the forward over `tokens` keeps for the backward."""
    layers = [layer_ops(model, index) for index in range(model.num_hidden_layers)]
    every = _total(ops(model), _saved, precision)
    if layout.recompute == "none":
        return every * tokens
    outside = every - sum(_total(layer, _saved, precision) for layer in layers)
    inputs = ITEMSIZE[precision.compute] * model.hidden_size * len(layers)
    results = [op for layer in layers for op in layer if layout.recompute == "selective" and op.kind in KEPT]
    return (outside + inputs + _total(results, _result, precision)) * tokens


def recomputed_bytes(model: ModelSpec, layout: Layout, precision: Precision, tokens: int) -> int:
    """Bytes of activations that the backward makes again, of the largest layer: one is in hand at a time."""
    layers = [layer_ops(model, index) for index in range(model.num_hidden_layers)]
    if layout.recompute == "none":
        return 0
    if layout.recompute == "full":
        return max(_total(layer, _saved, precision) for layer in layers) * tokens
    return max(_total((op for op in layer if op.kind not in KEPT), _result, precision) for layer in layers) * tokens


def _total(found: Iterable[Op], size: Callable[[Op, Precision], int], precision: Precision) -> int:
    return sum(size(op, precision) for op in found)


def _saved(op: Op, precision: Precision) -> int:
    """Bytes a token that `op` keeps for its backward."""
    sizes = {**ITEMSIZE, "compute": ITEMSIZE[precision.compute]}
    return sum(kept.numel_per_token * sizes[kept.dtype] for kept in op.saved)


def _result(op: Op, precision: Precision) -> int:
    """Bytes a token of what `op` returns."""
    return ITEMSIZE[precision.compute] * op.target.size
