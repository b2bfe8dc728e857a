"""Adapters beside frozen matrices: what is trained of a model when most of it is not.

    LoRA    y = W x + s B A x                                  (Hu et al., 2021, arXiv:2106.09685)
    DoRA    y = m / |W + s B A| * (W x + s B A x), by rows     (Liu et al., 2024, arXiv:2402.09353)

with A (r, in), B (out, r), a magnitude m (out,), and s = alpha / r or, rank-stabilised, alpha / sqrt(r) (Kalajdzievski,
2023, arXiv:2312.03732). The ledger of a model that has a `Lora` has these as parameters of operations of their own, of
kind "lora", and all others frozen (`kumi.spec.adapters`); sharding, checkpoints and plans read them from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

ALL = "all-linear"
INITS = ("default", "gaussian")
QUANTIZED = ("nf4",)

# Bits of an element in 4-bit NormalFloat, and the float32 scale that so many elements share (Dettmers et al., 2023,
# arXiv:2305.14314, without the quantisation of the scales).
NF4_BITS, NF4_BLOCK = 4, 64


@dataclass(frozen=True)
class Lora:
    """Adapters of rank `r` on the matrices that `targets` name: the ends of module names, such as "q_proj" or
    "mlp.up_proj", or "all-linear", which is every matrix of the layers but routers and routed experts.

    `dropout` is what is dropped of an adapter's input. A starts from `init`: "default" (uniform, as a new linear layer)
    or "gaussian" (normal with 1 / r); B from zero. `quantize` "nf4" keeps frozen matrices of layers in four bits.
    """

    r: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (ALL,)
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    init: str = "default"
    quantize: str = ""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (sqrt(self.r) if self.use_rslora else self.r)
