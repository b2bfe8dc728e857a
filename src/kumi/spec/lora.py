"""LoRA and DoRA: trained adapters of frozen matrices.

    LoRA    y = W x + s B A x                                  (Hu et al., 2021, arXiv:2106.09685)
    DoRA    y = m / |W + s B A| * (W x + s B A x), by rows     (Liu et al., 2024, arXiv:2402.09353)

with A (r, in), B (out, r), a magnitude m (out,), and s = alpha / r or, rank-stabilised, alpha / sqrt(r) (Kalajdzievski,
2023, arXiv:2312.03732). Each routed expert has an A and a B of its own. With a `Lora`, the ledger of a model has
operations of kind "lora" with these parameters, and all others but those of `Lora.modules` are frozen
(`kumi.spec.adapters`). Sharding, checkpoints and plans follow from the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

from kumi.spec.field_docs import described

ALL_LINEAR = "all-linear"
# The part of a target's name that selects the matrices of routed experts.
ROUTED_EXPERTS = "experts"
INITS = ("default", "gaussian")
QUANTIZATIONS = ("nf4",)

# Bits of a 4-bit NormalFloat element, the number of elements that share a float32 scale, and the bytes of the scale
# (Dettmers et al., 2023, arXiv:2305.14314, without the quantization of the scales).
NF4_BITS, NF4_BLOCK, NF4_SCALE_BYTES = 4, 64, 4
NF4_BLOCK_BYTES = NF4_BLOCK * NF4_BITS // 8 + NF4_SCALE_BYTES


def nf4_blocks(numel: Any) -> Any:
    """Return the number of blocks of a matrix with `numel` elements, an int or an array; the last may be incomplete."""
    return -(-numel // NF4_BLOCK)


@dataclass(frozen=True)
class Lora:
    """Adapters on the matrices of layers. A starts from `init`, B from zero. `quantize` is "" for no quantization."""

    r: int = described("Rank of the adapters.", 16)
    alpha: float = described("The output of an adapter is multiplied by `alpha` / `r`; `lora_alpha` in PEFT.", 32.0)
    targets: tuple[str, ...] = described(
        "Matrices that get adapters, by the ends of their names in kumi (`q_proj`, `mlp.up_proj`); "
        "'all-linear' is every matrix of the layers, except routers, routed experts and, in models with routed "
        "experts, feed-forward layers. 'experts' is every matrix of the routed experts, 'experts.down_proj' one.",
        (ALL_LINEAR,),
    )
    dropout: float = described("Fraction of an adapter's input that is dropped in training.", 0.0)
    use_rslora: bool = described("Divide `alpha` by the square root of `r` instead.", False)
    use_dora: bool = described("Train the magnitude of each row of the adapted matrices separately (DoRA).", False)
    init: str = described(
        "Initialization of A: 'default' as a new linear layer, 'gaussian' normal with standard deviation 1 / `r`.",
        "default",
    )
    quantize: str = described(
        "'nf4' keeps the frozen matrices of layers in four bits (QLoRA), with the package bitsandbytes.", ""
    )

    modules: tuple[str, ...] = described(
        "Modules that are trained in full beside the adapters, by the ends of their names in kumi: `embed_tokens`, "
        "`lm_head`, norms (`norm`, `input_layernorm`).",
        (),
    )

    @property
    def scale(self) -> float:
        """The factor of B A x."""
        return self.alpha / (sqrt(self.r) if self.use_rslora else self.r)
