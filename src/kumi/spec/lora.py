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

from kumi.spec.field_docs import described

ALL = "all-linear"
INITS = ("default", "gaussian")
QUANTIZED = ("nf4",)

# Bits of an element in 4-bit NormalFloat, and the float32 scale that so many elements share (Dettmers et al., 2023,
# arXiv:2305.14314, without the quantisation of the scales).
NF4_BITS, NF4_BLOCK = 4, 64


@dataclass(frozen=True)
class Lora:
    """Adapters on the matrices of layers. A starts from `init`, B from zero; `quantize` is "" where a run file says
    'none'."""

    r: int = described("Rank of the adapters.", 16)
    alpha: float = described("What an adapter gives is multiplied by `alpha` / `r`; `lora_alpha` in PEFT.", 32.0)
    targets: tuple[str, ...] = described(
        "Matrices that get adapters, by the ends of their names in kumi (`q_proj`, `mlp.up_proj`); "
        "'all-linear' is all those of the layers but routers, routed experts and, beside these, feed-forward layers.",
        (ALL,),
    )
    dropout: float = described("Share of an adapter's input that is dropped in training.", 0.0)
    use_rslora: bool = described("Divide `alpha` by the square root of `r` instead.", False)
    use_dora: bool = described("Train the length of each row of the adapted matrices apart (DoRA).", False)
    init: str = described(
        "How adapters begin: 'default' as new linear layers, 'gaussian' normal with 1 / `r`.", "default"
    )
    quantize: str = described(
        "'nf4' keeps the frozen matrices of layers in four bits (QLoRA), with the package bitsandbytes.", ""
    )

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (sqrt(self.r) if self.use_rslora else self.r)
