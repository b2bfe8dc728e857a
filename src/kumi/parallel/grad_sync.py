"""What is summed over ranks after the last backward of a step, many gradients in one message.

ZeRO 1 to 3 (FSDP2) and plain copies (DDP) sum during the backward. What is left:

    routed experts that nobody divides         over the ranks that hold the same experts
    everything under ZeRO-0 in a pipeline      over the ranks that hold the same stages
    a tied table in a pipeline                 over the ranks of the first and the last stage
    what tp ranks hold alike                   over tp
    ZeRO-3's tiles                             over dp_replicate
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.parallel.grad_norm import by_name, local
from kumi.parallel.mesh import Mesh
from kumi.parallel.mlp_tiling import divided_by_tiles
from kumi.parallel.stage_modules import Stages, stages_of
from kumi.spec.ledger import EMBEDDING
from kumi.spec.model import ModelSpec
from kumi.spec.shard_slices import partial_grad_params, tp_replicas
from kumi.spec.sharding import is_routed

# Bytes of a message: large enough for full bandwidth, small beside the gradients.
BUCKET = 64 * 2**20


@torch.no_grad()
def complete(model: nn.Module, mesh: Mesh) -> None:
    """Makes the gradients of `model` those of the whole step, once every microbatch's are there."""
    bare = getattr(model, "module", model)
    if mesh.layout.zero == 0 or "expert_dp" not in mesh.groups:
        _sum_copies(bare, mesh)
    if isinstance(bare, Stages) and bare.ties is not None and bare.spec.lora is None:
        table = dict(bare.named_parameters())[EMBEDDING]
        assert table.grad is not None
        sum_over([local(table.grad)], bare.ties)
    if mesh.layout.zero == 3:
        tiled = [one.grad for stage in stages_of(bare).values() for one in divided_by_tiles(stage, mesh)]
        sum_over([grad for grad in tiled if grad is not None], mesh.group("dp_replicate"), bare.reduce_dtype)  # type: ignore[arg-type]
    _sum_parts(bare, mesh)


def _sum_copies(model: nn.Module, mesh: Mesh) -> None:
    """Sums what DDP does not: experts, whose copies are on other ranks than those of the rest, and stages."""
    known, dtype = by_name(model.spec), model.reduce_dtype
    named = [(known[name], value.grad) for name, value in model.named_parameters() if value.grad is not None]
    sum_over([grad for param, grad in named if is_routed(param)], mesh.group("expert_data"), dtype)  # type: ignore[arg-type]
    if isinstance(model, Stages) and mesh.layout.zero == 0:
        sum_over([grad for param, grad in named if not is_routed(param)], mesh.group("data"), dtype)  # type: ignore[arg-type]


def _sum_parts(model: nn.Module, mesh: Mesh) -> None:
    """Adds up over the tp ranks the gradients of what they hold alike and of which each has a part, in one message.

    Where several ranks hold one of more key-value heads, each adds to its
    own head's place among all of them.
    """
    group, layout = mesh.group("tp"), mesh.layout
    if group is None:
        return
    spec: ModelSpec = model.spec  # type: ignore[assignment]
    known, wanted = by_name(spec), set(partial_grad_params(spec, layout))
    named = ((name, value.grad) for name, value in model.named_parameters())
    grads = [(name, local(grad)) for name, grad in named if name in wanted and grad is not None]
    places = [_place(grad, layout.tp // tp_replicas(known[name], layout).degree, mesh) for name, grad in grads]
    sum_over([whole for whole, _ in places], group)
    for (_, grad), (_, own) in zip(grads, places, strict=True):
        grad.copy_(own)


def _place(grad: Tensor, parts: int, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Room for the gradients of all `parts` that ranks hold, this rank's in its place, and that place."""
    whole = grad.new_zeros(parts, *grad.shape)
    own = whole[mesh.index("tp") * parts // mesh.layout.tp]
    own.copy_(grad)
    return whole, own


def sum_over(grads: Sequence[Tensor], group: dist.ProcessGroup | None, dtype: torch.dtype | None = None) -> None:
    """Sums each of `grads` over `group`, in place, travelling in `dtype` (None: their own). None: nothing to sum.

    All ranks of the group must give tensors of the same shapes in the same order.
    """
    if group is None or not grads:
        return
    underway: tuple[list[Tensor], Tensor, dist.Work] | None = None
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1).to(dtype or grad.dtype) for grad in bucket])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        if underway is not None:  # room for two messages, not for all gradients once more
            _arrive(*underway)
        underway = bucket, flat, work
    assert underway is not None
    _arrive(*underway)


def _arrive(bucket: Sequence[Tensor], flat: Tensor, work: dist.Work) -> None:
    """Puts the sums in `flat` in their places in `bucket`, once they are there."""
    work.wait()
    for grad, part in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
        grad.copy_(part.view(grad.shape))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`grads` in order, in runs of one dtype and about `BUCKET` bytes."""
    bucket: list[Tensor] = []
    for grad in grads:
        full = sum(one.nbytes for one in bucket) + grad.nbytes > BUCKET
        if bucket and (full or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket
