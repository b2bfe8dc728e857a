"""In which number formats a run computes."""

from __future__ import annotations

from dataclasses import dataclass

from kumi.spec.lora import NF4_BITS, NF4_BLOCK

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int64": 8, "uint8": 1}


@dataclass(frozen=True)
class Precision:
    """Dtypes by role: `param` of the master weights and optimizer states, `compute` of kept activations and of all
    arithmetic but what `products` says, `reduce` of gradients when ranks add them up.

    `products` is the dtype that the layers' matrix products multiply in where it is not `compute`: with "float8" their
    inputs are rounded on the way in, and what the backward pass keeps stays in `compute`.
    """

    kind: str
    param: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"
    products: str = ""

    def itemsize(self, *, frozen: bool = False, quantized: str = "") -> float:
        """Bytes of an element of a parameter at rest."""
        if quantized:
            return (NF4_BITS + 32 / NF4_BLOCK) / 8
        return ITEMSIZE[self.compute if frozen else self.param]

    @property
    def matmul_dtype(self) -> str:
        """The dtype in which the layers' matrix products multiply."""
        return self.products or self.compute

    @property
    def loss_scaling(self) -> bool:
        """Whether the loss must be scaled so that small gradients survive: only float16's range needs it."""
        return self.compute == "float16"


PRECISIONS = {
    "fp64": Precision("fp64", "float64", "float64", "float64"),
    "fp32": Precision("fp32"),
    "bf16": Precision("bf16", compute="bfloat16"),
    "fp16": Precision("fp16", compute="float16"),
    "fp8": Precision("fp8", compute="bfloat16", products="float8"),
    # Everything in two bytes, 8 a parameter with AdamW: small updates are lost to rounding.
    "bf16-pure": Precision("bf16-pure", "bfloat16", "bfloat16", "bfloat16"),
}
