"""Data parallelism: whole replicas (DDP), or states divided over the dp_shard ranks (FSDP2; ZeRO 1, 2, 3 and hybrid).

A rank's loss is its part of the step's mean, so gradients are added up over ranks, never averaged.

    zero  parameters at rest  gathered                              gradients are summed
    0     whole               -                                     all-reduce in the last microbatch
    1     divided             once a step                           reduce-scatter in the last microbatch
    2     divided             once a step                           reduce-scatter in every microbatch
    3     divided             every forward, again every backward   reduce-scatter in every microbatch

With dp_replicate > 1 beside dp_shard, the reduce-scattered parts are summed over dp_replicate in the last microbatch.
In a pipeline of stages, ZeRO-0 sums after the last backward what DDP would sum during it, and gradients of weights that
the schedule puts off are summed once they are there.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from kumi.compat import ddp_without_buffer_sync, fsdp_after_backward
from kumi.nn.decoder import Decoder, Embedding
from kumi.parallel.mesh import Mesh
from kumi.spec.precision import Precision


def is_divided(mesh: Mesh) -> bool:
    """Whether FSDP2 holds the parameters: ZeRO 1 to 3 over more than one rank."""
    return mesh.layout.zero > 0 and not mesh.alone and ("zero" in mesh.groups or "dp_replicate" in mesh.groups)


def bare(model: nn.Module) -> nn.Module:
    """The decoder itself: its parameters have the ledger's names, whatever data parallelism wraps it in."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def replicate(decoder: nn.Module, mesh: Mesh, precision: Precision) -> nn.Module:
    """`decoder` with whole replicas on all data ranks, which must hold equal weights already."""
    model = DistributedDataParallel(
        decoder,
        process_group=mesh.groups["data"],
        device_ids=[mesh.device] if mesh.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        **ddp_without_buffer_sync(),
    )
    model.register_comm_hook((mesh.groups["data"], getattr(torch, precision.reduce)), _sum_bucket)
    return model


def _sum_bucket(state: tuple[dist.ProcessGroup, torch.dtype], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Adds a bucket of gradients up over the group; DDP's own hook would average. DDP inspects this signature."""
    group, dtype = state
    buffer = bucket.buffer()
    future = dist.all_reduce(buffer.to(dtype), group=group, async_op=True).get_future()
    summed: torch.futures.Future[torch.Tensor] = future.then(lambda done: buffer.copy_(done.value()[0]))
    return summed


def shard(decoder: Decoder, mesh: Mesh, precision: Precision) -> None:
    """Divides the parameters of `decoder` over dp_shard, in place, in the units of `kumi.spec.sharding.units`.

    The last unit, gathered first and kept until the backward ends, is the decoder itself. Master weights stay in
    `precision.param`; what is gathered has `precision.compute`.
    """
    # Here, for it brings symbolic algebra along: half a second of CPU time that a rank alone need not spend.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute),
        reduce_dtype=getattr(torch, precision.reduce),
        cast_forward_inputs=False,  # rope tables stay in float32, as without sharding
    )
    axes = mesh.device_mesh("dp_replicate", "zero")
    layers = list(decoder.model.layers.values())
    # A table that is this stage's head, too, belongs to the root.
    alone = decoder.has_embedding and not (decoder.has_head and decoder.spec.tie_word_embeddings)
    for unit in [*([decoder.model.embed_tokens] if alone else []), *layers]:
        # The backward begins with the last layer: to free it in between would only cost another gathering.
        free = mesh.layout.zero == 3 and unit not in layers[-1:] and not getattr(unit, "shared", False)
        fully_shard(unit, mesh=axes, mp_policy=policy, reshard_after_forward=free)
    fully_shard(decoder, mesh=axes, mp_policy=policy, reshard_after_forward=False)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            # The gradient of a lookup needs no weights.
            module.set_unshard_in_backward(not isinstance(module, Embedding))
            # Gloo has no pre-multiplied sums; a plain sum divided by 1 is what is wanted anyway.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


@contextmanager
def sync_context(model: nn.Module, mesh: Mesh, *, last: bool) -> Iterator[None]:
    """Where the forward and backward of one microbatch run; `last` says that it is the step's last.

    Only what the layout's ZeRO stage asks for is communicated (see the table above). Between microbatches ZeRO-1 and 2
    leave parameters whole, in the compute dtype: look at parameters and gradients after the last one only.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if is_divided(mesh):
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule), "build divides the decoder when zero > 0"
        zero = mesh.layout.zero
        _reduce_when(model, last or zero > 1, last=last, free=last or zero == 3)
    yield


def _reduce_when(model: Any, reduce: bool, *, last: bool, free: bool) -> None:
    """What FSDP2 does after the next backward: whether it sums gradients, and frees what it gathered; `last` says that
    it is the step's last of this model."""
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(reduce)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(free)
    if model.has_embedding and getattr(model.model.embed_tokens, "shared", False):
        # Another stage reads it, too: it stays gathered, and its gradient unsummed, until the first stage is done.
        model.model.embed_tokens.set_requires_gradient_sync(last, recurse=False)
        model.model.embed_tokens.set_reshard_after_backward(last, recurse=False)


@contextmanager
def inputs_context(stage: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Where the backward pass of a stage runs that leaves weight gradients for later: nothing is summed."""
    if is_divided(mesh):
        _reduce_when(stage, False, last=False, free=mesh.layout.zero == 3)
    yield


def reduce_left(stage: nn.Module, mesh: Mesh, *, last: bool) -> None:
    """Does for weight gradients that were left for later what a backward pass does for all: with `last`, the step's
    last of the stage, sums them over the ranks that divide states, under ZeRO-3 every time."""
    if is_divided(mesh):
        free = last or mesh.layout.zero == 3
        _reduce_when(stage, free, last=last, free=free)
        fsdp_after_backward(stage)


BUCKET_BYTES = 25 * 2**20


def sum_gradients(gradients: Iterable[Tensor], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Adds `gradients` up over `group`, in place, some `BUCKET_BYTES` at a time; they travel in `dtype`."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(one.nbytes for one in bucket) + gradient.nbytes > BUCKET_BYTES:
            _sum_together(bucket, group, dtype)
            bucket = []
        bucket.append(gradient)
    if bucket:
        _sum_together(bucket, group, dtype)


def _sum_together(bucket: list[Tensor], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    flat = torch.cat([gradient.flatten() for gradient in bucket]).to(dtype)
    dist.all_reduce(flat, group=group)
    for gradient, summed in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def release(model: nn.Module) -> None:
    """Gives back parameters that a forward without a backward has left gathered: each rank holds its part again."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)  # FSDP2 gives it to the modules that it divides
        if callable(reshard):
            reshard()
