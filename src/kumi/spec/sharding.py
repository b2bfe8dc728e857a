"""Which mesh axis cuts which dim, and how much of every parameter a rank holds.

The cost model divides by this table and the trainer shards by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kumi.spec.layout import Layout
from kumi.spec.ledger import Param, params
from kumi.spec.model import ModelSpec

AXIS = {"vocab": "tp", "heads": "tp", "kv_heads": "tp", "ffn": "tp", "experts": "ep", "layers": "pp", "seq": "cp"}


@dataclass(frozen=True)
class Rows:
    """The rows of dim 0 that a rank holds: `count` of them from `start`. A rank past the end holds none."""

    start: int
    count: int


def shard_rows(size: int, degree: int, index: int) -> Rows:
    """Rows of shard `index` when `size` rows are cut into `degree` pieces of equal height, the last ones shorter.

    PyTorch's FSDP2 and DTensor cut this way (as `torch.chunk` does).
    """
    height = -(-size // degree)
    start = min(index * height, size)
    return Rows(start, min(height, size - start))


def local_shape(param: Param, layout: Layout, rank: int) -> tuple[int, ...]:
    """Shape of the part of `param` that `rank` keeps between steps: dim 0 is divided over dp_shard when zero > 0."""
    if layout.zero == 0:
        return param.shape
    rows = shard_rows(param.shape[0], layout.dp_shard, layout.coords(rank)["dp_shard"])
    return (rows.count, *param.shape[1:])


def local_numel(param: Param, layout: Layout, rank: int) -> int:
    """Elements of `param` that `rank` keeps between steps."""
    rows, *rest = local_shape(param, layout, rank)
    count = rows
    for size in rest:
        count *= size
    return count


@dataclass(frozen=True)
class StateBytes:
    """Bytes a rank holds for the model's states.

    `params`, `grads` and `optimizer` are what lies between the backward pass and the update. `gathered` is what the
    forward and backward passes hold besides, at most: parameters put together from all ranks, and, where ZeRO keeps
    gradients whole until the last microbatch, those gradients.
    """

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


def state_bytes(model: ModelSpec, layout: Layout, rank: int, *, state_per_param: int, state_per_tensor: int) -> StateBytes:
    """Bytes of float32 parameters, float32 gradients and optimizer state on `rank`.

    `state_per_param` and `state_per_tensor` are the optimizer's bytes (`kumi.spec.optim.Optim`). Under FSDP2 a rank whose
    shard of a tensor is empty keeps no state for it beyond the per-tensor part.
    """
    numel = sum(local_numel(param, layout, rank) for param in params(model))
    tensors = len(params(model))
    return StateBytes(4 * numel, 4 * numel, state_per_param * numel + state_per_tensor * tensors)
