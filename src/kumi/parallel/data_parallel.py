"""Data parallelism: replicas (DDP), or states sharded over ranks (FSDP2; ZeRO 1, 2, 3 and hybrid).

States are parameters, gradients and optimizer states. The ranks that shard them are those of dp_shard and cp.

A rank's loss is its part of the step's mean, so gradients are summed over ranks, not averaged.

    zero  resident parameters  all-gather                         gradient reduction
    0     unsharded            -                                  all-reduce in the last microbatch
    1     sharded              once per step                      reduce-scatter in the last microbatch
    2     sharded              once per step                      reduce-scatter in every microbatch
    3     sharded              every forward and every backward   reduce-scatter in every microbatch

Packed 4-bit matrices (`kumi.nn.nf4`) are sharded by ZeRO-3 only, and all-gathered packed.

With dp_replicate > 1, the reduce-scattered shards are all-reduced over dp_replicate in the last microbatch. The
gradients of pipeline stages under ZeRO-0 are reduced after the last backward instead of by DDP. Weight gradients that
the pipeline schedule defers are reduced when they are complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from kumi.accelerator import is_gpu
from kumi.compat import (
    ddp_without_buffer_sync,
    free_gather_buffer,
    keep_integers_in_fsdp,
    rerun_fsdp_post_backward,
    reshards_after_forward,
)
from kumi.nn.decoder import Decoder, DecoderLayer, Embedding
from kumi.nn.moe import MoE
from kumi.nn.nf4 import packed_matrices
from kumi.parallel.mesh import Mesh
from kumi.parallel.mlp_tiling import tile_sharded_weights
from kumi.parallel.powersgd import powersgd_hook, powersgd_state
from kumi.parallel.recompute import Recompute
from kumi.parallel.stage_modules import params_by_name
from kumi.spec.comm import DEFAULT_COMM, Comm
from kumi.spec.layout import Layout
from kumi.spec.precision import Precision
from kumi.spec.sharding import fsdp_units, is_routed, stage_ops


def uses_fsdp(mesh: Mesh) -> bool:
    """Return True if FSDP2 shards the parameters: ZeRO 1 to 3 over more than one rank."""
    return mesh.layout.zero > 0 and not mesh.is_single and ("zero" in mesh.groups or "dp_replicate" in mesh.groups)


def apply_ddp(decoder: nn.Module, mesh: Mesh, precision: Precision, comm: Comm = DEFAULT_COMM) -> nn.Module:
    """Return `decoder` inside DDP over all data-parallel ranks, which must have the same weights already."""
    # Routed experts are replicated on other ranks than the other parameters: `kumi.parallel.grad_sync` reduces them.
    params = params_by_name(decoder.spec)
    experts = [name for name, _ in decoder.named_parameters() if name in params and is_routed(params[name])]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(decoder, experts)  # type: ignore[no-untyped-call]
    model = DistributedDataParallel(
        decoder,
        process_group=mesh.groups["data"],
        device_ids=[mesh.device] if is_gpu(mesh.device) else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        bucket_cap_mb=comm.bucket_mb,
        **ddp_without_buffer_sync(),
    )
    if comm.compress == "powersgd":
        model.register_comm_hook(powersgd_state(mesh.groups["data"], comm), powersgd_hook)
    else:
        model.register_comm_hook((mesh.groups["data"], getattr(torch, precision.reduce)), _sum_bucket)
    return model


def _sum_bucket(state: tuple[dist.ProcessGroup, torch.dtype], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the group, in the dtype of `state` (DDP's default is the average).

    DDP checks the types in this signature.
    """
    group, dtype = state
    buffer = bucket.buffer()
    sent = buffer.to(dtype)
    future = dist.all_reduce(sent, group=group, async_op=True).get_future()
    summed: torch.futures.Future[torch.Tensor] = future.then(lambda done: buffer.copy_(sent))
    return summed


def apply_fsdp(decoder: Decoder, mesh: Mesh, precision: Precision, comm: Comm = DEFAULT_COMM) -> None:
    """Shard the parameters of `decoder`, in place, in the units of `kumi.spec.sharding.fsdp_units`.

    A unit is the modules that one `fully_shard` call shards and gathers together. The root unit is the decoder itself:
    it is all-gathered first and stays unsharded until the backward ends; it has the token table if that is the head,
    too, and hardly a parameter otherwise. Shards are in `precision.param`, all-gathered parameters in
    `precision.compute`.
    """
    # Imported here: it imports sympy, half a second of CPU time that a single process does not need.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute),
        reduce_dtype=getattr(torch, precision.reduce),
        cast_forward_inputs=False,  # keep the rotary tables in float32, as without sharding
    )
    options = {"mp_policy": policy, **_offload_policy(mesh)}
    axes = mesh.device_mesh("dp_replicate", "zero")
    layers, units_by_name = list(decoder.model.layers.values()), _unit_modules(decoder)
    ignored = _shard_experts(decoder, units_by_name["experts"], mesh, options)
    ignored |= set(tile_sharded_weights(decoder, mesh))
    packed = [parameter for matrix in packed_matrices(decoder).values() for parameter in matrix.parameters()]
    if packed and mesh.layout.zero == 3:
        keep_integers_in_fsdp()
    else:
        ignored |= set(packed)  # nothing in them is trained: no state to shard
    outer = [*units_by_name["embedding"], *units_by_name["layer"], *units_by_name["head"]]
    for unit in outer:
        # The backward begins with the head and the last layer: resharding them after the forward would only cost
        # another all-gather.
        last = unit[0] in layers[-1:] or unit in units_by_name["head"]
        free = mesh.layout.zero == 3 and not last and not getattr(unit[0], "shared", False)
        modules: Any = unit if len(unit) > 1 else unit[0]
        fully_shard(modules, mesh=axes, reshard_after_forward=free, ignored_params=ignored, **options)
    fully_shard(decoder, mesh=axes, reshard_after_forward=False, ignored_params=ignored, **options)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            # The gradient of a lookup needs no weights.
            module.set_unshard_in_backward(not isinstance(module, Embedding))
            # Sum without averaging, by plain sums: gloo has no pre-multiplied sums.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    if decoder.has_head:
        # FSDP2 would keep the buffer of the last all-gather beside the logits, to the end of the forward pass.
        decoder.model.norm.register_forward_hook(lambda *_: free_gather_buffer(decoder))
    if comm.prefetch is not None:
        _set_prefetch([unit[0] for unit in outer], comm.prefetch)
    if outer:  # a last stage without layers has the root alone, if its head is tied
        _stop_prefetch(outer[0][0])


def _unit_modules(decoder: Decoder) -> dict[str, list[list[nn.Module]]]:
    """Return for each kind of FSDP unit ("layer", ...) the modules of each such unit of `decoder`, in forward order."""
    modules: dict[str, list[list[nn.Module]]] = {"embedding": [], "layer": [], "experts": [], "head": [], "root": []}
    ops = stage_ops(
        decoder.spec, map(int, decoder.model.layers), embedding=decoder.has_embedding, head=decoder.has_head
    )
    for unit in fsdp_units(ops):
        modules[unit.name].append([decoder.get_submodule(name) for name in unit.modules])
    return modules


def _set_prefetch(units: list[Any], count: int) -> None:
    """Make each of `units`, which are in forward order, prefetch the next `count` units of the forward and backward."""
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        previous = units[max(0, index - count) : index][::-1]
        unit.set_modules_to_backward_prefetch([other for other in previous if not isinstance(other, Embedding)])


def _stop_prefetch(first: nn.Module) -> None:
    """Make `first`, the first unit of a stage, prefetch no other unit in the backward pass.

    FSDP2 would gather the unit whose forward pass came before: the head in the previous microbatch of the step. The
    first one whose forward pass ends is the last unit inside of `first` (experts), else `first` itself.
    """
    from torch.distributed.fsdp import FSDPModule

    unit = [module for module in first.modules() if isinstance(module, FSDPModule)][-1]
    unit.set_modules_to_backward_prefetch([unit])  # it is there already; an empty list would mean FSDP2's default


def offloads_states(layout: Layout) -> bool:
    """Return True if resident parameters and gradients are in the host's memory."""
    return layout.offload.startswith("states")


def _offload_policy(mesh: Mesh) -> dict[str, Any]:
    """Return the argument that makes `fully_shard` keep states on the host; none unless the layout offloads them."""
    if not offloads_states(mesh.layout):
        return {}
    from torch.distributed.fsdp import CPUOffloadPolicy

    return {"offload_policy": CPUOffloadPolicy(pin_memory=is_gpu(mesh.device))}


def _shard_experts(
    decoder: Decoder, experts: list[list[nn.Module]], mesh: Mesh, options: dict[str, Any]
) -> set[nn.Parameter]:
    """Shard the routed `experts` of each layer over the ranks with the same experts, as units of their own.

    The weights are sharded along dim 1; dim 0 counts the experts. Return the parameters that stay unsharded, because no
    other rank has the same experts.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    axes = mesh.device_mesh("dp_replicate", "expert_dp") if "expert_dp" in mesh.groups else None
    unsharded: set[nn.Parameter] = set()
    layers = cast(list[DecoderLayer], list(decoder.model.layers.values()))
    routed = [layer for layer in layers if isinstance(layer.mlp, MoE)]
    for layer, (unit,) in zip(routed, experts, strict=True):
        if axes is None:
            unsharded |= set(unit.parameters())
        else:
            free = mesh.layout.zero == 3 and layer is not layers[-1]
            fully_shard(unit, mesh=axes, reshard_after_forward=free, shard_placement_fn=lambda _: Shard(1), **options)
            for wrapper in layer.wrappers:
                if isinstance(wrapper, Recompute):
                    wrapper.leave_out(unit)
    return unsharded


@contextmanager
def sync_context(model: nn.Module, mesh: Mesh, *, last: bool) -> Iterator[None]:
    """A context for the forward and backward of one microbatch; `last`: the microbatch is the last of the step.

    Gradients are reduced according to the ZeRO stage (see the table of this module). Between microbatches, ZeRO-1 and 2
    leave parameters unsharded in the compute dtype, so read parameters and gradients only after the last microbatch.
    """
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if uses_fsdp(mesh):
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule), "build shards the decoder if zero > 0"
        zero = mesh.layout.zero
        _set_after_backward(model, last or zero > 1, last=last, free=last or zero == 3)
    yield


def _set_after_backward(model: Any, reduce: bool, *, last: bool, free: bool) -> None:
    """Set FSDP2's actions after the next backward of `model`.

    `reduce`: reduce-scatter gradients. `last`: it is the last backward of the step. `free`: reshard parameters.
    """
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(reduce)
    model.set_requires_all_reduce(last)
    model.set_reshard_after_backward(free)
    if model.has_embedding and getattr(model.model.embed_tokens, "shared", False):
        # Another stage uses the table too: it stays unsharded, with an unreduced gradient, until the last backward.
        model.model.embed_tokens.set_requires_gradient_sync(last, recurse=False)
        model.model.embed_tokens.set_reshard_after_backward(last, recurse=False)


@contextmanager
def input_grad_context(stage: nn.Module, mesh: Mesh) -> Iterator[None]:
    """A context for a backward pass that defers the weight gradients: nothing is reduced."""
    if uses_fsdp(mesh):
        _set_after_backward(stage, False, last=False, free=mesh.layout.zero == 3)
    yield


def reduce_deferred_wgrads(stage: nn.Module, mesh: Mesh, *, last: bool) -> None:
    """Reduce-scatter deferred weight gradients, as FSDP2 does after a backward pass.

    ZeRO-3 reduces every time, ZeRO 1 and 2 only if these are the `last` weight gradients of the stage in this step.
    """
    if uses_fsdp(mesh):
        free = last or mesh.layout.zero == 3
        _set_after_backward(stage, free, last=last, free=free)
        rerun_fsdp_post_backward(stage)


@contextmanager
def gathered(decoder: Decoder, mesh: Mesh) -> Iterator[None]:
    """A context in which every rank has all parameters, and forward passes communicate none.

    Ranks may then make different numbers of forward passes. The parameters are in the compute dtype.
    """
    if not uses_fsdp(mesh):
        yield
        return
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in decoder.modules() if isinstance(module, FSDPModule)]
    freed = [unit for unit in units if reshards_after_forward(unit)]
    for unit in units:
        unit.unshard()
    for unit in freed:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in freed:
            unit.set_reshard_after_forward(True, recurse=False)
        reshard(decoder)


def reshard(model: nn.Module) -> None:
    """Free the all-gathered parameters after a forward without a backward."""
    for module in model.modules():
        fsdp_reshard = getattr(module, "reshard", None)  # a method of FSDP2 modules
        if callable(fsdp_reshard):
            fsdp_reshard()
