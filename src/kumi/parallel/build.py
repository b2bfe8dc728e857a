"""Build the model of one rank: sharded, with its weights, ready to train.

The order is: decoder on the meta device -> adapters -> tensor, expert and context parallelism -> packed (4-bit)
matrices -> recomputation and offloading -> compilation -> FSDP2 -> allocation -> values of the weights -> copies of
float32 weights in the compute dtype -> DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from kumi.nn.decoder import Decoder, DecoderLayer
from kumi.nn.linear import linears
from kumi.nn.nf4 import use_packed_weights
from kumi.nn.wrappers import Wrapper
from kumi.parallel import context_parallel, data_parallel, expert_parallel, mlp_tiling, tensor_parallel
from kumi.parallel.activation_offload import OffloadStream, offload_wrappers
from kumi.parallel.async_tp import use_async_tp
from kumi.parallel.compiled import prepare_to_compile
from kumi.parallel.float8 import use_float8
from kumi.parallel.lora import add_adapters, connect_adapters, draw_reader, fill_frozen_and_adapters, replay_dropout
from kumi.parallel.mesh import Mesh
from kumi.parallel.packed_weights import fill_packed_matrices
from kumi.parallel.recompute import Recompute
from kumi.parallel.stage_modules import (
    Stages,
    local_stages,
    share_tied_table,
    splits_backward,
    stages_of,
    tie_group,
    uses_stages,
)
from kumi.parallel.state_tensors import PieceReader, draw_pieces, fill_pieces, model_pieces
from kumi.parallel.weight_copies import add_weight_copies, uses_weight_copies
from kumi.spec.comm import DEFAULT_COMM, Comm
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision


def build(
    spec: ModelSpec,
    mesh: Mesh,
    precision: Precision,
    *,
    weights: int | PieceReader,
    compile: bool = False,
    comm: Comm = DEFAULT_COMM,
    adapters: int | PieceReader = 0,
    frozen: bool = False,
) -> nn.Module:
    """Return this rank's part of the decoder of `spec`, which is called like `kumi.nn.Decoder`. `build` itself
    communicates nothing.

    `weights`: a seed, from which every layout draws the same values, or a function that reads a slice of a tensor,
    `weights("model/<parameter>", start, shape)`. If `spec` has adapters, `weights` are those of the frozen model.
    `compile`: compile each layer separately; layers of the same structure share the compiled code.
    `comm`: how gradients and parameters are communicated.
    `adapters`: a seed or a reader for the adapters.
    `frozen`: the model is only evaluated: without gradients, and without DDP, which would allocate buffers for them.
    """
    model = assemble(spec, mesh, precision, compile=compile, comm=comm)
    _allocate(model, mesh)
    tensor_parallel.zero_vocab_padding(model, mesh)
    pieces = model_pieces(model, mesh)
    if spec.lora is not None:
        base = draw_reader(spec, weights) if isinstance(weights, int) else weights
        fill_frozen_and_adapters(pieces, spec, precision, base, adapters)
        fill_packed_matrices(model, spec, mesh, getattr(torch, precision.compute), base)
    elif isinstance(weights, int):
        draw_pieces(pieces, spec, weights)
    else:
        fill_pieces(pieces, weights)
    if frozen:
        return model.eval().requires_grad_(False)
    if uses_weight_copies(mesh, precision):
        add_weight_copies(model, precision)
    return with_ddp(model, mesh, precision, comm)


def _allocate(model: nn.Module, mesh: Mesh) -> None:
    """Allocate the parameters on the device or, if the layout offloads states, on the host; buffers on the device."""
    model.to_empty(device="cpu" if data_parallel.offloads_states(mesh.layout) else mesh.device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device))


def assemble(
    spec: ModelSpec, mesh: Mesh, precision: Precision, *, compile: bool = False, comm: Comm = DEFAULT_COMM
) -> Decoder | Stages:
    """Return the model that `build` returns, sharded, on the meta device: without memory and without DDP."""
    if uses_stages(mesh.layout):
        model: Decoder | Stages = _build_stages(spec, mesh, precision)
    else:
        model = Decoder(spec, device="meta", dtype=getattr(torch, precision.param))
    decoders = [decoder for decoder in stages_of(model).values() if isinstance(decoder, Decoder)]
    # `recompute_layers` counts the layers of the rank, over all of its stages.
    layers = [layer for decoder in decoders for layer in decoder.model.layers.values()]
    recomputed = layers[: mesh.layout.recompute_layers]
    for decoder in decoders:
        _shard(decoder, mesh, precision, recomputed, compile=compile, comm=comm)
    return model


def with_ddp(model: Decoder | Stages, mesh: Mesh, precision: Precision, comm: Comm = DEFAULT_COMM) -> nn.Module:
    """Return `model` inside DDP, or `model` itself if it is made of stages, sharded by FSDP2 or without replicas.

    Its weights must be filled already.
    """
    without_ddp = isinstance(model, Stages) or data_parallel.uses_fsdp(mesh) or "data" not in mesh.groups
    return model if without_ddp else data_parallel.apply_ddp(model, mesh, precision, comm)


def _build_stages(spec: ModelSpec, mesh: Mesh, precision: Precision) -> Stages:
    """Return the stages of this rank, on the meta device."""
    last = mesh.layout.pp * mesh.layout.stages - 1
    dtype = getattr(torch, precision.param)
    stages = {
        stage: Decoder(
            spec, device="meta", dtype=dtype, layers=range(*bounds), embedding=stage == 0, head=stage == last
        )
        for stage, bounds in local_stages(spec, mesh).items()
    }
    for decoder in stages.values():
        decoder.log_probs = partial(decoder.log_probs, pipelined=True)
    share_tied_table(stages)
    return Stages(spec, stages, precision, tie_group(spec, mesh))


def _shard(
    decoder: Decoder, mesh: Mesh, precision: Precision, recomputed: Sequence[nn.Module], *, compile: bool, comm: Comm
) -> None:
    """Shard a decoder or a stage as the layout says, on the meta device.

    The layers in `recomputed` recompute their activations.
    """
    decoder.compute_dtype = getattr(torch, precision.compute)
    decoder.reduce_dtype = getattr(torch, precision.reduce)
    add_adapters(decoder, mesh, precision)
    tensor_parallel.apply_tensor_parallel(decoder, mesh)
    connect_adapters(decoder, mesh)
    if comm.async_tp:
        use_async_tp(decoder, mesh)
    expert_parallel.apply_expert_parallel(decoder, mesh)
    mlp_tiling.tile_mlps(decoder, mesh, precision)
    if precision.products == "float8":
        use_float8(decoder, mesh.device)
    if decoder.spec.lora is not None and decoder.spec.lora.quantize:
        use_packed_weights(decoder)
    if "cp" in mesh.groups:
        decoder.make_attention = context_parallel.context_parallel_attention(mesh)
        decoder.make_lengths = context_parallel.context_parallel_lengths(mesh)
    if splits_backward(mesh.layout):
        for linear in linears(decoder):
            linear.defers_wgrad = True
    layers = cast(list[DecoderLayer], list(decoder.model.layers.values()))
    for layer, wrappers in zip(layers, _wrappers(decoder, layers, mesh, recomputed, compile), strict=True):
        layer.wrappers.extend(wrappers)
    if compile:
        prepare_to_compile(decoder, mesh)
        for layer in layers:
            layer.compile()
    if data_parallel.uses_fsdp(mesh):
        data_parallel.apply_fsdp(decoder, mesh, precision, comm)


def _wrappers(
    decoder: Decoder, layers: Sequence[DecoderLayer], mesh: Mesh, recomputed: Sequence[nn.Module], compiled: bool
) -> list[list[Wrapper]]:
    """Return the wrappers of each of `layers`, the innermost first: recomputation, then offloading of activations."""
    mode = mesh.layout.recompute
    wrappers: list[list[Wrapper]] = [[] for _ in layers]
    for layer, layer_wrappers in zip(layers, wrappers, strict=True):
        if mode != "none" and layer in recomputed:
            layer_wrappers.extend(replay_dropout(decoder, Recompute(mode, compiled=compiled)))
    if mesh.layout.offload == "activations":
        for layer_wrappers, offload in zip(
            wrappers, offload_wrappers(OffloadStream(mesh.device), len(layers)), strict=True
        ):
            layer_wrappers.append(offload)
    return wrappers
