"""The gradient reductions after the last backward of a step, in large buckets.

ZeRO 1 to 3 (FSDP2) and replicas (DDP) reduce during the backward. This module reduces the rest:

    routed experts that no rank shards                over the ranks with the same experts
    all parameters under ZeRO-0 in a pipeline         over the ranks with the same stages
    a tied token table in a pipeline                  over the ranks of the first and the last stage
    partial gradients of parameters replicated on tp  over tp
    partial gradients of routed experts' adapters     over expert_tp
    weights that ZeRO-3 gathers tile by tile          over dp_replicate

A gradient is partial if each rank has computed it from its own tokens, heads or columns only: the sum is the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.parallel.mesh import Mesh
from kumi.parallel.mlp_tiling import tile_sharded_weights
from kumi.parallel.stage_modules import Stages, local_shard, params_by_name, stages_of, unwrap
from kumi.spec.ledger import EMBEDDING
from kumi.spec.model import ModelSpec
from kumi.spec.shard_slices import partial_expert_params, partial_grad_params, tp_replicas
from kumi.spec.sharding import is_routed

# Large enough for full bandwidth, small compared to the gradients.
_BUCKET_BYTES = 64 * 2**20


@torch.no_grad()
def finish_grad_sync(model: nn.Module, mesh: Mesh) -> None:
    """Complete the gradients of `model` after the backward of all microbatches of a step."""
    inner = unwrap(model)
    if mesh.layout.zero == 0 or "expert_dp" not in mesh.groups:
        _reduce_replicas(inner, mesh)
    if isinstance(inner, Stages) and inner.ties is not None:
        table = dict(inner.named_parameters())[EMBEDDING]
        if table.requires_grad:
            assert table.grad is not None
            all_reduce_grads([local_shard(table.grad)], inner.ties)
    if mesh.layout.zero == 3:
        grads = [weight.grad for stage in stages_of(inner).values() for weight in tile_sharded_weights(stage, mesh)]
        tiled = [grad for grad in grads if grad is not None]
        all_reduce_grads(tiled, mesh.group("dp_replicate"), inner.reduce_dtype)  # type: ignore[arg-type]
    _reduce_partial(inner, mesh)
    _reduce_partial_experts(inner, mesh)


def _reduce_replicas(model: nn.Module, mesh: Mesh) -> None:
    """Reduce the gradients that DDP does not reduce: those of routed experts, whose replicas are on other ranks than
    those of other parameters, and under ZeRO-0 those of pipeline stages."""
    params = params_by_name(model.spec)
    dtype: torch.dtype | None = model.reduce_dtype  # type: ignore[assignment]
    named = [(params[name], value.grad) for name, value in model.named_parameters() if value.grad is not None]
    routed = [grad for param, grad in named if is_routed(param)]
    all_reduce_grads(routed, mesh.group("expert_data"), dtype)
    if isinstance(model, Stages) and mesh.layout.zero == 0:
        others = [grad for param, grad in named if not is_routed(param)]
        all_reduce_grads(others, mesh.group("data"), dtype)


def _reduce_partial(model: nn.Module, mesh: Mesh) -> None:
    """All-reduce, over tp, the partial gradients of parameters that are replicated on several tp ranks.

    With fewer key-value heads than ranks, several ranks have the same head. The buffer that is all-reduced has a slot
    for each head, and a rank writes its gradient to the slot of its head.
    """
    group, layout = mesh.group("tp"), mesh.layout
    if group is None:
        return
    spec: ModelSpec = model.spec  # type: ignore[assignment]
    params, partial = params_by_name(spec), set(partial_grad_params(spec, layout))
    named = ((name, value.grad) for name, value in model.named_parameters())
    grads = [(name, local_shard(grad)) for name, grad in named if name in partial and grad is not None]
    slots = [_slots(grad, layout.tp // tp_replicas(params[name], layout).degree, mesh) for name, grad in grads]
    all_reduce_grads([all_shards for all_shards, _ in slots], group)
    for (_, grad), (_, slot) in zip(grads, slots, strict=True):
        grad.copy_(slot)


def _reduce_partial_experts(model: nn.Module, mesh: Mesh) -> None:
    """All-reduce, over expert_tp, the partial gradients of parameters that are replicated on its ranks."""
    names = set(partial_expert_params(model.spec, mesh.layout))
    named = ((name, value.grad) for name, value in model.named_parameters())
    grads = [local_shard(grad) for name, grad in named if name in names and grad is not None]
    all_reduce_grads(grads, mesh.group("expert_tp"))


def _slots(grad: Tensor, shards: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Return a buffer for the gradients of all `shards`, zero but for this rank's, and this rank's slot in it."""
    buffer = grad.new_zeros(shards, *grad.shape)
    slot = buffer[mesh.index("tp") * shards // mesh.layout.tp]
    slot.copy_(grad)
    return buffer, slot


def all_reduce_grads(
    grads: Sequence[Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None
) -> None:
    """Sum each of `grads` over `group`, in place, in buckets.

    `dtype`: dtype of the messages; None for the dtype of the gradients. Do nothing without a group. All ranks of the
    group must give tensors of the same shapes in the same order.
    """
    if group is None or not grads:
        return
    pending: tuple[list[Tensor], Tensor, dist.Work] | None = None
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1).to(dtype or grad.dtype) for grad in bucket])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        if pending is not None:  # at most two buckets are in memory
            _unflatten(*pending)
        pending = bucket, flat, work
    assert pending is not None
    _unflatten(*pending)


def _unflatten(bucket: Sequence[Tensor], flat: Tensor, work: dist.Work) -> None:
    """Wait for the sums in `flat`, and copy them to the tensors of `bucket`."""
    work.wait()
    for grad, part in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
        grad.copy_(part.view(grad.shape))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `grads` in order, in buckets of one dtype and about `_BUCKET_BYTES`."""
    bucket: list[Tensor] = []
    for grad in grads:
        full = sum(tensor.nbytes for tensor in bucket) + grad.nbytes > _BUCKET_BYTES
        if bucket and (full or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket
