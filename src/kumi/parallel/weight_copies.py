"""Copies of float32 weights in the compute dtype, for ranks on which FSDP gathers no weights.

One GPU and the replicas of DDP hold float32 master weights. A linear layer would cast its weight in every forward pass,
and autograd would keep the copy until the backward pass has used it. Instead, the copies stay, and one fused operation
fills all of a stage before its first forward pass after an update. Layers that are recomputed go on casting: between
their forward and their backward pass they keep no copy, so copies that stay would need memory that the planner does not
count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    dtype = getattr(torch, precision.compute)
    for stage in stages_of(unwrap(model)).values():
        assert isinstance(stage, Decoder)
        copied = list[Linear]()
        for layer in stage.model.layers.values():
            assert isinstance(layer, DecoderLayer)
            if not any(isinstance(wrapper, Recompute) for wrapper in layer.wrappers):
                copied += _cast_linears(layer, dtype)
        for linear in copied:
            linear.weight_copy = torch.empty_like(linear.weight, dtype=dtype)
        if copied:
            copies = WeightCopies(copied)
            copies.fill()
            stage.register_forward_pre_hook(copies)


class WeightCopies:
    """The copies of the weights of `layers`: a forward pre-hook of their stage, which fills them if weights changed.

    PyTorch counts the changes of a tensor in place in `Tensor._version`: those of an optimizer, and of values loaded.
    """

    def __init__(self, layers: list[Linear]) -> None:
        self._weights: list[torch.Tensor] = [layer.weight for layer in layers]
        self._copies = [copy for layer in layers if (copy := layer.weight_copy) is not None]
        self._version = -1  # the sum over weights when the copies were filled

    def __call__(self, stage: nn.Module, inputs: Any) -> None:
        if sum(weight._version for weight in self._weights) != self._version:
            self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the weights."""
        torch._foreach_copy_(self._copies, self._weights)
        self._version = sum(weight._version for weight in self._weights)


def _cast_linears(layer: nn.Module, dtype: torch.dtype) -> Iterator[Linear]:
    """Yield the linear layers of `layer` whose weights are cast to `dtype`."""
    for linear in linears(layer):
        if linear.packed is None and linear.weight.requires_grad and linear.weight.dtype != dtype:
            yield linear
