"""Copies of float32 weights in the compute dtype, for ranks on which FSDP gathers no weights.

One GPU and the replicas of DDP hold float32 master weights. A linear layer would cast its weight in every forward pass,
and autograd would keep the copy until the backward pass has used it. Instead, the copies stay, and one fused operation
after each update fills all of them. Layers that are recomputed go on casting: between their forward and their backward
pass they keep no copy, so copies that stay would need memory that the planner does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from kumi.accelerator import is_gpu
from kumi.nn.decoder import Decoder, DecoderLayer
from kumi.nn.linear import Linear, linears
from kumi.parallel import data_parallel
from kumi.parallel.mesh import Mesh
from kumi.parallel.recompute import Recompute
from kumi.parallel.stage_modules import stages_of, unwrap
from kumi.spec.precision import Precision


def uses_weight_copies(mesh: Mesh, precision: Precision) -> bool:
    """Return True if this rank's linear layers have copies of their weights: on a GPU without FSDP.

    MLPs that are computed in tiles cast one tile at a time, without copies.
    """
    casts = precision.param != precision.compute
    on_device = mesh.layout.tiles == 1 and not data_parallel.offloads_states(mesh.layout)
    return casts and on_device and is_gpu(mesh.device) and not data_parallel.uses_fsdp(mesh)


def add_weight_copies(model: nn.Module, precision: Precision) -> None:
    """Give the linear layers of `model`, a result of `build`, copies of their weights, if they are not recomputed."""
    for stage in stages_of(unwrap(model)).values():
        assert isinstance(stage, Decoder)
        for layer in stage.model.layers.values():
            assert isinstance(layer, DecoderLayer)
            if not any(isinstance(wrapper, Recompute) for wrapper in layer.wrappers):
                for linear in _cast_linears(layer, getattr(torch, precision.compute)):
                    linear.weight_copy = torch.empty_like(linear.weight, dtype=getattr(torch, precision.compute))
    refresh_weight_copies(model)


@torch.no_grad()
def refresh_weight_copies(model: nn.Module) -> None:
    """Copy the weights of `model` again. Call it whenever they have changed."""
    pairs = list(_pairs(linears(unwrap(model))))
    if pairs:
        copies, weights = zip(*pairs, strict=True)
        torch._foreach_copy_(copies, weights)


def _cast_linears(layer: nn.Module, dtype: torch.dtype) -> Iterator[Linear]:
    """Yield the linear layers of `layer` whose weights are cast to `dtype`."""
    for linear in linears(layer):
        if linear.packed is None and linear.weight.requires_grad and linear.weight.dtype != dtype:
            yield linear


def _pairs(layers: Iterable[Linear]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the copy and the weight of each of `layers` that has a copy."""
    for layer in layers:
        if layer.weight_copy is not None:
            yield layer.weight_copy, layer.weight.detach()
