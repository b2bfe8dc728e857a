"""A decoder laid onto the mesh, weights in place, ready to train.

meta device -> recompute -> compile -> divide (FSDP2) -> memory -> weights -> replicate (DDP). What is cut along further
axes (tensor, expert, context, pipeline) comes before recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from kumi.nn.decoder import Decoder, DecoderLayer
from kumi.nn.linear import linears
from kumi.nn.wrappers import Around
from kumi.parallel import context_parallel, data_parallel, expert_parallel, mlp_tiling, tensor_parallel
from kumi.parallel.activation_offload import Flow, keepers
from kumi.parallel.async_tp import overlap
from kumi.parallel.compiled import leave_uncompiled
from kumi.parallel.float8 import multiply_in_float8
from kumi.parallel.lora import add_adapters, connect, drop_alike, fill_adapted, fill_packed, to_pack
from kumi.parallel.mesh import Mesh
from kumi.parallel.recompute import Recompute
from kumi.parallel.stage_modules import (
    Stages,
    held_stages,
    in_stages,
    share_table,
    splits_backward,
    stages_of,
    tie_group,
)
from kumi.parallel.state_tensors import Reader, draw, fill, model_pieces
from kumi.spec.comm import DEFAULT_COMM, Comm
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision


def build(
    spec: ModelSpec,
    mesh: Mesh,
    precision: Precision,
    *,
    weights: int | Reader,
    compile: bool = False,
    comm: Comm = DEFAULT_COMM,
    adapters: int | Reader = 0,
) -> nn.Module:
    """The decoder of `spec` on `mesh`, called like `kumi.nn.Decoder`; a rank holds its own part of it only.

    `weights` is a seed, from which every layout draws the same values, or a function that reads one part of a tensor,
    `weights("model/<parameter>", start, shape)`. Nothing is communicated, so ranks need not keep step here.
    `compile` compiles each layer by itself: equal layers share what was compiled.
    `comm` says how gradients and parameters travel. Where `spec` has adapters, `weights` are those of the frozen model,
    and `adapters` is the like for them.
    """
    model = assemble(spec, mesh, precision, compile=compile, comm=comm)
    packed = to_pack(model)
    _give_memory(model, mesh)
    tensor_parallel.clear_padding(model, mesh)
    pieces = model_pieces(model, mesh)
    if spec.lora is not None:
        fill_adapted(pieces, spec, weights, adapters)
        fill_packed(packed, spec, mesh, precision, weights, adapters)
    elif isinstance(weights, int):
        draw(pieces, spec, weights)
    else:
        fill(pieces, weights)
    return replicated(model, mesh, precision, comm)


def _give_memory(model: nn.Module, mesh: Mesh) -> None:
    """Parameters get memory where the layout keeps them, and buffers, which are small, on the device."""
    model.to_empty(device="cpu" if data_parallel.on_host(mesh.layout) else mesh.device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device))


def assemble(
    spec: ModelSpec, mesh: Mesh, precision: Precision, *, compile: bool = False, comm: Comm = DEFAULT_COMM
) -> Decoder | Stages:
    """What `build` builds, still on the meta device: cut, divided, and without memory."""
    if in_stages(mesh.layout):
        model: Decoder | Stages = _stages(spec, mesh, precision)
    else:
        model = Decoder(spec, device="meta", dtype=getattr(torch, precision.param))
    decoders = [decoder for decoder in stages_of(model).values() if isinstance(decoder, Decoder)]
    # The first that the rank holds, whatever stage they belong to.
    recomputed = [layer for one in decoders for layer in one.model.layers.values()][: mesh.layout.recompute_layers]
    for decoder in decoders:
        _prepare(decoder, mesh, precision, recomputed, compile=compile, comm=comm)
    return model


def replicated(model: Decoder | Stages, mesh: Mesh, precision: Precision, comm: Comm = DEFAULT_COMM) -> nn.Module:
    """`model`, which has its weights; where the data ranks hold whole replicas, as one that sums its gradients."""
    whole = isinstance(model, Stages) or data_parallel.is_divided(mesh) or "data" not in mesh.groups
    return model if whole else data_parallel.replicate(model, mesh, precision, comm)


def _stages(spec: ModelSpec, mesh: Mesh, precision: Precision) -> Stages:
    """The stages of this rank, without memory yet."""
    last = mesh.layout.pp * mesh.layout.stages - 1
    dtype = getattr(torch, precision.param)
    held = {
        stage: Decoder(
            spec, device="meta", dtype=dtype, layers=range(*bounds), embedding=stage == 0, head=stage == last
        )
        for stage, bounds in held_stages(spec, mesh).items()
    }
    share_table(held)
    return Stages(spec, held, precision, tie_group(spec, mesh))


def _prepare(
    decoder: Decoder, mesh: Mesh, precision: Precision, recomputed: Sequence[nn.Module], *, compile: bool, comm: Comm
) -> None:
    """Makes a decoder, or a stage of one, compute as the layout says; its memory comes after. Of its layers those in
    `recomputed` are."""
    decoder.compute_dtype = getattr(torch, precision.compute)
    decoder.reduce_dtype = getattr(torch, precision.reduce)
    add_adapters(decoder, mesh, precision)
    tensor_parallel.cut(decoder, mesh)
    connect(decoder, mesh)
    if comm.async_tp:
        overlap(decoder, mesh)
    expert_parallel.deal(decoder, mesh)
    mlp_tiling.tile(decoder, mesh, precision)
    if precision.products == "float8":
        multiply_in_float8(decoder, mesh.device)
    if "cp" in mesh.groups:
        decoder.attention_over = context_parallel.attention_over(mesh)
        decoder.lengths_over = context_parallel.lengths_over(mesh)
    if splits_backward(mesh.layout):
        for layer in linears(decoder):
            layer.splits = True
    layers = cast(list[DecoderLayer], list(decoder.model.layers.values()))
    for block, wrappers in zip(layers, _wrappers(decoder, layers, mesh, recomputed), strict=True):
        block.around.extend(wrappers)
    if compile:
        leave_uncompiled(decoder)
        for block in layers:
            block.compile()
    if data_parallel.is_divided(mesh):
        data_parallel.shard(decoder, mesh, precision, comm)


def _wrappers(
    decoder: Decoder, layers: Sequence[DecoderLayer], mesh: Mesh, recomputed: Sequence[nn.Module]
) -> list[list[Around]]:
    """Return what surrounds each of `layers`, the innermost first: recomputation, then activations kept on the host."""
    how = mesh.layout.recompute
    wrappers: list[list[Around]] = [[] for _ in layers]
    for layer, around in zip(layers, wrappers, strict=True):
        if how != "none" and layer in recomputed:
            around.extend(drop_alike(decoder, Recompute(how)))
    if mesh.layout.offload == "activations":
        for around, keeper in zip(wrappers, keepers(Flow(mesh.device), len(layers)), strict=True):
            around.append(keeper)
    return wrappers
