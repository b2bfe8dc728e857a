"""Which mesh axis cuts which dim, and how much of every parameter a rank holds.

The cost model divides by this table and the trainer shards by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kumi.spec.layout import Layout
from kumi.spec.ledger import Param, params
from kumi.spec.model import ModelSpec
from kumi.spec.optim import Optim
from kumi.spec.precision import ITEMSIZE, Precision

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


def units(model: ModelSpec) -> tuple[tuple[Param, ...], ...]:
    """The parameters in the pieces that are gathered and reduced as one: embedding, each layer, and last the root.

    The root has the final norm and the head, and the embedding where they share it; it is gathered when the forward
    begins and kept until the backward, which needs the head first, has ended.
    """
    found: dict[str, list[Param]] = {}
    for param in params(model):
        found.setdefault(_unit(param, model.tie_word_embeddings), []).append(param)
    root = found.pop("")
    return (*(tuple(unit) for unit in found.values()), tuple(root))


def _unit(param: Param, tied: bool) -> str:
    """The module that is gathered with `param`; empty for the root."""
    parts = param.name.split(".")
    if parts[1] == "layers":
        return ".".join(parts[:3])
    return "model.embed_tokens" if parts[1] == "embed_tokens" and not tied else ""


@dataclass(frozen=True)
class StateBytes:
    """Bytes a rank holds for the model's states between the backward pass and the update."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.params + self.grads + self.optimizer


def state_bytes(model: ModelSpec, layout: Layout, rank: int, precision: Precision, optim: Optim) -> StateBytes:
    """Bytes of parameters, gradients and optimizer states on `rank`, all kept in the precision's `param` dtype.

    Under FSDP2 a rank whose shard of a tensor is empty keeps only the optimizer's step counter for it.
    """
    size = ITEMSIZE[precision.param] * sum(local_numel(param, layout, rank) for param in params(model))
    counters = ITEMSIZE["float32"] * len(params(model))
    return StateBytes(size, size, optim.moments * size + counters)


def checkpoint_bytes(model: ModelSpec, precision: Precision, optim: Optim) -> int:
    """Bytes of the tensors in a checkpoint, over all ranks: parameters and optimizer states, each once."""
    whole = state_bytes(model, Layout(), 0, precision, optim)
    return whole.params + whole.optimizer


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes that the forward and backward passes hold beside the states, at most.

    `params`: parameters put together from all ranks. `transfer`: the buffer a unit travels through, at the moment when
    it is copied out. `accumulated`: whole gradients that wait for the last microbatch. `grads`: whole gradients of the
    microbatch at hand, on their way to be divided.
    """

    params: int
    transfer: int
    accumulated: int
    grads: int

    @property
    def total(self) -> int:
        return self.params + self.transfer + self.accumulated + self.grads


def gathered_bytes(model: ModelSpec, layout: Layout, precision: Precision, microbatches: int) -> GatheredBytes:
    """What dividing states costs in passing, on any rank; all zero where nothing is divided.

    ZeRO-1 and 2 keep every unit whole from its first use in a step to its last; ZeRO-3 keeps the root and one other.
    Gradients are whole for the root and one other unit, in the compute dtype; where there is more than one microbatch,
    ZeRO-1 also accumulates those of all units, in the dtype they are reduced in.
    """
    if layout.zero == 0 or layout.dp_shard == 1:
        return GatheredBytes(0, 0, 0, 0)
    compute = ITEMSIZE[precision.compute]
    *others, root = (sum(_padded_numel(param, layout.dp_shard) for param in unit) for unit in units(model))
    *exact, exact_root = (sum(param.numel for param in unit) for unit in units(model))
    whole = root + (max(others) if layout.zero == 3 else sum(others))
    kept = exact_root + sum(exact) if layout.zero == 1 and microbatches > 1 else 0
    return GatheredBytes(
        compute * whole,
        compute * max(*others, root),
        ITEMSIZE[precision.reduce] * kept,
        compute * (exact_root + max(exact)),
    )


def _padded_numel(param: Param, degree: int) -> int:
    """Elements of `param` once its rows are padded so that `degree` ranks have equally many."""
    return shard_rows(param.shape[0], degree, 0).count * degree * (param.numel // param.shape[0])
