"""The dtypes of a run, by role."""

from __future__ import annotations

from dataclasses import dataclass

from kumi.spec.lora import NF4_BLOCK, NF4_BLOCK_BYTES

# Dtype -> bytes of an element.
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int64": 8, "uint8": 1}


@dataclass(frozen=True)
class Precision:
    """Dtypes by role.

    - `param`: master weights and optimizer states.
    - `compute`: activations and arithmetic.
    - `reduce`: gradients in reductions between ranks.
    - `products`: matmuls of layers, if not `compute`. With "float8", inputs are rounded for the matmul, and the saved
      activations stay in `compute`.
    """

    kind: str
    param: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"
    products: str = ""

    def itemsize(self, *, frozen: bool = False, quantized: str = "") -> float:
        """Return the bytes per element of a resident parameter."""
        if quantized:
            return NF4_BLOCK_BYTES / NF4_BLOCK
        return ITEMSIZE[self.compute if frozen else self.param]

    @property
    def matmul_dtype(self) -> str:
        """The dtype of the matmuls of layers."""
        return self.products or self.compute

    @property
    def loss_scaling(self) -> bool:
        """True if the loss must be scaled so that small gradients do not underflow: only in float16."""
        return self.compute == "float16"


PRECISIONS = {
    "fp64": Precision("fp64", "float64", "float64", "float64"),
    "fp32": Precision("fp32"),
    "bf16": Precision("bf16", compute="bfloat16"),
    "fp16": Precision("fp16", compute="float16"),
    "fp8": Precision("fp8", compute="bfloat16", products="float8"),
    # All states in two bytes, 8 bytes per parameter with AdamW: small updates are lost to rounding.
    "bf16-pure": Precision("bf16-pure", "bfloat16", "bfloat16", "bfloat16"),
}
