"""How many bytes of device memory a rank needs, by kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kumi.spec.batch import BatchSpec
from kumi.spec.layout import Layout
from kumi.spec.ledger import Op, layer_ops, ops, params
from kumi.spec.model import ModelSpec
from kumi.spec.optim import Optim
from kumi.spec.precision import ITEMSIZE, Precision
from kumi.spec.sharding import state_bytes

# Tokens whose logits exist at one time (`kumi.nn.logprob`): one chunk of float32 logits, and one of their gradient.
LOGIT_CHUNK = 1024

# What `recompute = "selective"` computes again: cheap operations whose results are large.
CHEAP = ("norm", "gate", "rope", "add")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest rank, by kind, at the peak of a step.

    `weights` are the copies of parameters in the compute dtype (and those gathered from other ranks), `head` the logits
    of one chunk with their gradient.
    """

    params: int
    grads: int
    optimizer: int
    weights: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def estimate_memory(
    model: ModelSpec, layout: Layout, batch: BatchSpec, precision: Precision, optim: Optim
) -> MemoryEstimate:
    """The estimate for rank 0, which holds the largest shards."""
    states = state_bytes(
        model, layout, 0, state_per_param=optim.state_bytes_per_param, state_per_tensor=optim.state_bytes_per_tensor
    )
    tokens = layout.microbatch * batch.seq_len
    return MemoryEstimate(
        states.params,
        states.grads,
        states.optimizer,
        _weights(model, layout, precision),
        activation_bytes(model, layout, precision, tokens),
        2 * ITEMSIZE["float32"] * min(tokens, LOGIT_CHUNK) * model.vocab_size,
    )


def _weights(model: ModelSpec, layout: Layout, precision: Precision) -> int:
    """Bytes of parameters in the compute dtype while a microbatch is in flight."""
    size = ITEMSIZE[precision.compute]
    if layout.zero == 3:
        # Two units are whole at a time: the one in use and the one being fetched.
        return 2 * size * max(_unit_numel(model))
    if layout.zero == 0 and precision.compute == precision.param:
        return 0
    return size * sum(param.numel for param in params(model))


def _unit_numel(model: ModelSpec) -> list[int]:
    """Parameters of each unit that is gathered as one: every layer, the embedding, the head."""
    sizes: dict[str, int] = {}
    for param in params(model):
        parts = param.name.split(".")
        unit = ".".join(parts[:3]) if parts[1] == "layers" else parts[0] + parts[1]
        sizes[unit] = sizes.get(unit, 0) + param.numel
    return list(sizes.values())


def activation_bytes(model: ModelSpec, layout: Layout, precision: Precision, tokens: int) -> int:
    """Bytes that the forward over `tokens` keeps for the backward, with what recomputation needs at its peak."""
    if layout.recompute == "none":
        return sum(_saved(op, precision) for op in ops(model)) * tokens
    layers = [layer_ops(model, index) for index in range(model.num_hidden_layers)]
    outside = sum(_saved(op, precision) for op in ops(model)) - sum(
        _saved(op, precision) for layer in layers for op in layer
    )
    again = [
        sum(_saved(op, precision) for op in layer if layout.recompute == "full" or op.kind in CHEAP) for layer in layers
    ]
    kept = sum(_saved(op, precision) for layer in layers for op in layer) - sum(again)
    inputs = ITEMSIZE[precision.compute] * model.hidden_size * model.num_hidden_layers
    return (outside + kept + inputs + max(again)) * tokens


def _saved(op: Op, precision: Precision) -> int:
    """Bytes a token that `op` keeps."""
    sizes = {**ITEMSIZE, "compute": ITEMSIZE[precision.compute]}
    return sum(kept.numel_per_token * sizes[kept.dtype] for kept in op.saved)
