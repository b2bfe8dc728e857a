"""AdamW whose moments of matrices take a byte an element (Dettmers et al., 2022, arXiv:2110.02861).

The moments are decoded, the update is AdamW's in float32 or wider, and they are encoded again, some rows at a time.
Vectors, and matrices of fewer than 4,096 elements in all, are updated as AdamW does. Where tp cuts rows, the ranks
agree on the scales of their blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kumi.parallel.grad_norm import local
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.adamw import update_group
from kumi.parallel.optim.optimizer import Trained, drop_gradients, gradient_of, groups_of, new_states
from kumi.parallel.optim.quantize_8bit import Blocks, Code, dynamic_code
from kumi.parallel.optim.shard_sums import axes_of, max_over
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import COUNTER, MOMENTS, QUANTIZED_BLOCK, SCALES, has_quantized_moments
from kumi.spec.shard_slices import slices

# Elements that are decoded at a time: many for a kernel, few beside a model's.
AT_ONCE = 2**22


@dataclass(frozen=True)
class AdamW8bit:
    """Parameters in groups, and their states: AdamW's in the groups `others`, codes and scales in `quantised`, whose
    descriptions are `matrices`. `codes` are those of the first and of the second moment."""

    optim: Optim
    mesh: Mesh
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]
    others: list[dict[str, Any]]
    quantised: list[dict[str, Any]]
    matrices: dict[Tensor, Param]
    codes: tuple[Code, Code]
    at_once: int = AT_ONCE

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient. All ranks must call it together."""
        for group in self.others:
            update_group(group, self.state)
        for group in self.quantised:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""
        drop_gradients(self.param_groups)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        param, state, part = self.matrices[parameter], self.state[parameter], local(parameter)
        state[COUNTER].add_(1)
        if not part.numel():
            return
        blocks, axes = blocks_of(param, self.mesh), axes_of(param, self.mesh.layout, len(param.dims) - 1)
        tensors = [part, gradient_of(parameter), *(state[name] for name in (*MOMENTS, *SCALES))]
        count = max(1, self.at_once // part.shape[-1])
        pieces = (torch.split(tensor.view(-1, tensor.shape[-1]), count) for tensor in tensors)
        for rows, gradient, *moments in zip(*pieces, strict=True):
            codes, scales = moments[:2], moments[2:]
            mean, square = (blocks.decoded(*one, wide(part.dtype)) for one in zip(codes, scales, self.codes))
            update_rows(group, rows, gradient, mean, square, state[COUNTER])
            largest = torch.stack([blocks.largest(mean), blocks.largest(square)])
            max_over(largest, axes, self.mesh)
            for place, moment in enumerate((mean, square)):
                codes[place].copy_(blocks.encoded(moment, largest[place], self.codes[place]))
                scales[place].copy_(largest[place])


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the update's arithmetic: float32, or float64 for parameters that have it."""
    return torch.promote_types(dtype, torch.float32)


def update_rows(
    group: dict[str, Any], rows: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor
) -> None:
    """AdamW's update of `rows` and its moments, in place; `step` counts this one already."""
    beta1, beta2 = group["betas"]
    mean.lerp_(gradient.to(mean.dtype), 1 - beta1)
    square.mul_(beta2).addcmul_(gradient.to(square.dtype), gradient.to(square.dtype), value=1 - beta2)
    first, second = (1 - beta ** step.double() for beta in (beta1, beta2))
    direction = mean / (square.sqrt() / second.sqrt() + group["eps"])
    rows.mul_(1 - group["lr"] * group["weight_decay"])
    rows.sub_(direction * (group["lr"] / first))


def blocks_of(param: Param, mesh: Mesh) -> Blocks:
    """Return the blocks of what this rank holds of the rows of `param`, which ZeRO does not cut."""
    (region, *_) = slices(param, replace(mesh.layout, zero=0), mesh.rank)
    return Blocks(region.start[-1], region.shape[-1], -(-param.shape[-1] // QUANTIZED_BLOCK))


def build_adamw_8bit(trained: Trained) -> AdamW8bit:
    """Return 8-bit AdamW over `trained`, with its states zero."""
    optim, mesh = trained.optim, trained.mesh
    matrices: dict[Tensor, Param] = {one: param for param, one in trained.parameters if has_quantized_moments(param)}
    groups = groups_of([(one, param.decayed) for param, one in trained.parameters if one in matrices], optim)
    others = groups_of([(one, param.decayed) for param, one in trained.parameters if one not in matrices], optim)
    states: dict[Tensor, dict[str, Tensor]] = {
        one: new_states(param, one, optim, mesh) for param, one in trained.parameters
    }
    codes = dynamic_code(mesh.device, signed=True), dynamic_code(mesh.device, signed=False)
    return AdamW8bit(optim, mesh, [*groups, *others], states, others, groups, matrices, codes)
