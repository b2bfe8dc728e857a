"""AdamW whose moments of matrices take one byte per element (Dettmers et al., 2022, arXiv:2110.02861).

The moments of some rows at a time are decoded, updated by AdamW in float32 or wider, and encoded again. Vectors, and
matrices of fewer than 4,096 elements, use plain AdamW. If tp splits rows, a block of elements with one scale may lie on
two ranks, so the ranks agree on the scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.adamw import update_param_group
from kumi.parallel.optim.optimizer import TrainedParams, drop_grads, local_grad, make_param_groups, zero_states
from kumi.parallel.optim.quantize_8bit import Codebook, RowBlocks, dynamic_codebook
from kumi.parallel.optim.shard_sums import axes_of_dim, max_over_axes
from kumi.parallel.stage_modules import local_shard
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import COUNTER, MOMENTS, QUANTIZED_BLOCK, SCALES, has_quantized_moments
from kumi.spec.shard_slices import slices

# Elements decoded at a time: enough for a kernel, few compared to the model.
_AT_ONCE = 2**22


@dataclass(frozen=True)
class AdamW8bit:
    """Parameters in groups, and their states.

    `others`: groups of parameters with AdamW's states.
    `quantised`: groups of matrices, whose states are 8-bit codes and scales.
    `matrices`: the parameters of `quantised` with their descriptions.
    `codebooks`: those of the first and the second moment.
    `at_once`: elements decoded at a time.
    """

    optim: Optim
    mesh: Mesh
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]
    others: list[dict[str, Any]]
    quantised: list[dict[str, Any]]
    matrices: dict[Tensor, Param]
    codebooks: tuple[Codebook, Codebook]
    at_once: int = _AT_ONCE

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. All ranks must call it together."""
        for group in self.others:
            update_param_group(group, self.state)
        for group in self.quantised:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def zero_grad(self) -> None:
        """Free the gradients."""
        drop_grads(self.param_groups)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update a matrix and its codes and scales, some rows at a time."""
        param, state, part = self.matrices[parameter], self.state[parameter], local_shard(parameter)
        state[COUNTER].add_(1)
        if not part.numel():
            return
        blocks, axes = blocks_of(param, self.mesh), axes_of_dim(param, self.mesh.layout, len(param.dims) - 1)
        tensors = [part, local_grad(parameter), *(state[name] for name in (*MOMENTS, *SCALES))]
        count = max(1, self.at_once // part.shape[-1])
        pieces = (torch.split(tensor.view(-1, tensor.shape[-1]), count) for tensor in tensors)
        for rows, gradient, *moments in zip(*pieces, strict=True):
            codes, scales = moments[:2], moments[2:]
            mean, square = (blocks.decode(*moment, wide(part.dtype)) for moment in zip(codes, scales, self.codebooks))
            update_rows(group, rows, gradient, mean, square, state[COUNTER])
            largest = torch.stack([blocks.largest(mean), blocks.largest(square)])
            max_over_axes(largest, axes, self.mesh)
            for place, moment in enumerate((mean, square)):
                codes[place].copy_(blocks.encode(moment, largest[place], self.codebooks[place]))
                scales[place].copy_(largest[place])


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the update's arithmetic: float32, or float64 for float64 parameters."""
    return torch.promote_types(dtype, torch.float32)


def update_rows(
    group: dict[str, Any], rows: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor
) -> None:
    """Update `rows` and its moments in place by AdamW; `step` already counts this step."""
    beta1, beta2 = group["betas"]
    mean.lerp_(gradient.to(mean.dtype), 1 - beta1)
    square.mul_(beta2).addcmul_(gradient.to(square.dtype), gradient.to(square.dtype), value=1 - beta2)
    first, second = (1 - beta ** step.double() for beta in (beta1, beta2))
    direction = mean / (square.sqrt() / second.sqrt() + group["eps"])
    rows.mul_(1 - group["lr"] * group["weight_decay"])
    rows.sub_(direction * (group["lr"] / first))


def blocks_of(param: Param, mesh: Mesh) -> RowBlocks:
    """Return the blocks of this rank's shard of the rows of `param`. ZeRO does not shard within rows."""
    (region, *_) = slices(param, replace(mesh.layout, zero=0), mesh.rank)
    return RowBlocks(region.start[-1], region.shape[-1], -(-param.shape[-1] // QUANTIZED_BLOCK))


def build_adamw_8bit(trained: TrainedParams) -> AdamW8bit:
    """Return 8-bit AdamW over `trained`, with its states zero."""
    optim, mesh = trained.optim, trained.mesh
    matrices: dict[Tensor, Param] = {
        parameter: param for param, parameter in trained.parameters if has_quantized_moments(param)
    }
    decayed = [(parameter, param.decayed) for param, parameter in trained.parameters]
    groups = make_param_groups([item for item in decayed if item[0] in matrices], optim)
    others = make_param_groups([item for item in decayed if item[0] not in matrices], optim)
    states: dict[Tensor, dict[str, Tensor]] = {
        parameter: zero_states(param, parameter, optim, mesh) for param, parameter in trained.parameters
    }
    codebooks = dynamic_codebook(mesh.device, signed=True), dynamic_codebook(mesh.device, signed=False)
    return AdamW8bit(optim, mesh, [*groups, *others], states, others, groups, matrices, codebooks)
