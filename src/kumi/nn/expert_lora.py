"""LoRA adapters on the matrices of routed experts. Each expert has its own A and B, stacked in one tensor each.

    y = W_e x + s B_e A_e x    for a row x of expert e

Where ranks split the width of the experts, each rank computes this from its rows or columns of W_e, as in a linear
layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kumi.nn.grouped_gemm import grouped_linear
from kumi.nn.moe import Experts
from kumi.spec.lora import Lora


class LoraExperts(Experts):
    """`Experts` with adapters. It takes over the parameters of `old`; the adapters' are in `dtype`.

    `loras`: the settings of each matrix with an adapter, by its name. The adapter of the matrix `name` (X, out, in)
    consists of the parameters `name`_lora_A (X, in, r) and `name`_lora_B (X, out, r). `r` is last in both, because ZeRO
    shards the dim after the experts, and `r` may be less than the number of ranks. If `uses_adapter` is False,
    only the frozen experts are computed.
    """

    def __init__(self, old: Experts, loras: Mapping[str, Lora], *, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.spec, self.how, self.adds_bias, self.loras = old.spec, old.how, old.adds_bias, dict(loras)
        self.uses_adapter = True
        self.gate_up_proj, self.gate_up_proj_bias = old.gate_up_proj, old.gate_up_proj_bias
        self.up_proj, self.up_proj_bias = old.up_proj, old.up_proj_bias
        self.down_proj, self.down_proj_bias = old.down_proj, old.down_proj_bias
        for name, lora in loras.items():
            matrix: Tensor = getattr(old, name)
            count, rows, columns = matrix.shape
            for factor, shape in (("A", (columns, lora.r)), ("B", (rows, lora.r))):
                values = torch.empty(count, *shape, device=matrix.device, dtype=dtype)
                self.register_parameter(f"{name}_lora_{factor}", nn.Parameter(values))

    def product(self, rows: Tensor, name: str, counts: Tensor, ends: Tensor) -> Tensor:
        out, lora = super().product(rows, name, counts, ends), self.loras.get(name)
        if lora is None or not self.uses_adapter:
            return out
        a, b = (getattr(self, f"{name}_lora_{factor}") for factor in "AB")
        added = grouped_linear(grouped_linear(rows, a.transpose(1, 2), counts, ends), b, counts, ends)
        # This must not work in place, because selective recomputation keeps the results of matrix products.
        return torch.add(out, added, alpha=lora.scale)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: r={lora.r}, alpha={lora.alpha}" for name, lora in self.loras.items())
