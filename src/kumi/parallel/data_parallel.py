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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from kumi.compat import ddp_without_buffer_sync, rerun_fsdp_post_backward
from kumi.nn.decoder import Decoder, DecoderLayer, Embedding
from kumi.nn.moe import MoE
from kumi.parallel.grad_norm import by_name
from kumi.parallel.mesh import Mesh
from kumi.parallel.mlp_tiling import divided_by_tiles
from kumi.parallel.powersgd import low_rank, sum_low_rank
from kumi.parallel.recompute import Recompute
from kumi.spec.comm import DEFAULT_COMM, Comm
from kumi.spec.layout import Layout
from kumi.spec.precision import Precision
from kumi.spec.sharding import fsdp_units, is_routed, stage_ops


def is_divided(mesh: Mesh) -> bool:
    """Whether FSDP2 holds the parameters: ZeRO 1 to 3 over more than one rank."""
    return mesh.layout.zero > 0 and not mesh.alone and ("zero" in mesh.groups or "dp_replicate" in mesh.groups)


def bare(model: nn.Module) -> nn.Module:
    """The decoder itself: its parameters have the ledger's names, whatever data parallelism wraps it in."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def replicate(decoder: nn.Module, mesh: Mesh, precision: Precision, comm: Comm = DEFAULT_COMM) -> nn.Module:
    """`decoder` with whole replicas on all data ranks, which must hold equal weights already."""
    # Copies of experts are on other ranks than those of the rest: `kumi.parallel.grad_sync` sums them.
    experts = [name for name, _ in decoder.named_parameters() if is_routed(by_name(decoder.spec)[name])]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(decoder, experts)  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(
        decoder,
        process_group=mesh.groups["data"],
        device_ids=[mesh.device] if mesh.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        bucket_cap_mb=comm.bucket_mb,
        **ddp_without_buffer_sync(),
    )
    if comm.compress == "powersgd":
        model.register_comm_hook(low_rank(mesh.groups["data"], comm), sum_low_rank)
    else:
        model.register_comm_hook((mesh.groups["data"], getattr(torch, precision.reduce)), _sum_bucket)
    return model


def _sum_bucket(state: tuple[dist.ProcessGroup, torch.dtype], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Adds a bucket of gradients up over the group; DDP's own hook would average. DDP inspects this signature."""
    group, dtype = state
    buffer = bucket.buffer()
    sent = buffer.to(dtype)
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()
    summed: torch.futures.Future[torch.Tensor] = future.then(lambda done: buffer.copy_(sent))
    return summed


def shard(decoder: Decoder, mesh: Mesh, precision: Precision, comm: Comm = DEFAULT_COMM) -> None:
    """Divides the parameters of `decoder` over dp_shard, in place, in the units of `kumi.spec.sharding.fsdp_units`.

    The root unit, gathered first and kept until the backward ends, is the decoder itself. Master weights stay in
    `precision.param`; what is gathered has `precision.compute`.
    """
    # Here, for it brings symbolic algebra along: half a second of CPU time that a rank alone need not spend.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute),
        reduce_dtype=getattr(torch, precision.reduce),
        cast_forward_inputs=False,  # rope tables stay in float32, as without sharding
    )
    options = {"mp_policy": policy, **_offload_policy(mesh)}
    axes = mesh.device_mesh("dp_replicate", "zero")
    layers, of_unit = list(decoder.model.layers.values()), _modules(decoder)
    apart = _shard_experts(decoder, of_unit["experts"], mesh, options) | set(divided_by_tiles(decoder, mesh))
    outer = [*of_unit["embedding"], *of_unit["layer"]]
    for unit in outer:
        # The backward begins with the last layer: to free it in between would only cost another gathering.
        free = mesh.layout.zero == 3 and unit[0] not in layers[-1:] and not getattr(unit[0], "shared", False)
        parts: Any = unit if len(unit) > 1 else unit[0]
        fully_shard(parts, mesh=axes, reshard_after_forward=free, ignored_params=apart, **options)
    fully_shard(decoder, mesh=axes, reshard_after_forward=False, ignored_params=apart, **options)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            # The gradient of a lookup needs no weights.
            module.set_unshard_in_backward(not isinstance(module, Embedding))
            # Gloo has no pre-multiplied sums; a plain sum divided by 1 is what is wanted anyway.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if comm.prefetch is not None:
        _gather_ahead([unit[0] for unit in outer], comm.prefetch)


def _modules(decoder: Decoder) -> dict[str, list[list[nn.Module]]]:
    """Return the modules of each unit of `decoder`, in the order of the forward pass, by the units' names."""
    modules: dict[str, list[list[nn.Module]]] = {"embedding": [], "layer": [], "experts": [], "root": []}
    ops = stage_ops(
        decoder.spec, map(int, decoder.model.layers), embedding=decoder.has_embedding, head=decoder.has_head
    )
    for unit in fsdp_units(ops):
        modules[unit.name].append([decoder.get_submodule(name) for name in unit.modules])
    return modules


def _gather_ahead(units: list[Any], count: int) -> None:
    """Has each of `units`, in the order of the forward, gather the `count` after it, or in the backward before it."""
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + count])
        before = units[max(0, number - count) : number][::-1]
        unit.set_modules_to_backward_prefetch([one for one in before if not isinstance(one, Embedding)])


def on_host(layout: Layout) -> bool:
    """Whether what a rank keeps of parameters and gradients between their uses lies in the host's memory."""
    return layout.offload.startswith("states")


def _offload_policy(mesh: Mesh) -> dict[str, Any]:
    if not on_host(mesh.layout):
        return {}
    from torch.distributed.fsdp import CPUOffloadPolicy

    return {"offload_policy": CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")}


def _shard_experts(
    decoder: Decoder, experts: list[list[nn.Module]], mesh: Mesh, options: dict[str, Any]
) -> set[nn.Parameter]:
    """Divides the routed `experts` of each layer, a unit of their own, among the ranks that hold the same, by the dim
    after theirs; returns those that no other rank holds, which stay as they are."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    axes = mesh.device_mesh("dp_replicate", "expert_dp") if "expert_dp" in mesh.groups else None
    whole: set[nn.Parameter] = set()
    layers = cast(list[DecoderLayer], list(decoder.model.layers.values()))
    routed = [layer for layer in layers if isinstance(layer.mlp, MoE)]
    for layer, (unit,) in zip(routed, experts, strict=True):
        if axes is None:
            whole |= set(unit.parameters())
        else:
            free = mesh.layout.zero == 3 and layer is not layers[-1]
            fully_shard(unit, mesh=axes, reshard_after_forward=free, shard_placement_fn=lambda _: Shard(1), **options)
            for wrapper in layer.around:
                if isinstance(wrapper, Recompute):
                    wrapper.leave_out(unit)
    return whole


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
        rerun_fsdp_post_backward(stage)


def release(model: nn.Module) -> None:
    """Gives back parameters that a forward without a backward has left gathered: each rank holds its part again."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)  # FSDP2 gives it to the modules that it divides
        if callable(reshard):
            reshard()
