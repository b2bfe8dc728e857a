"""In which number formats a run computes."""

from __future__ import annotations

from dataclasses import dataclass

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


@dataclass(frozen=True)
class Precision:
    """Dtypes by role: `param` of the master weights and optimizer states, `compute` of matrix products and kept
    activations, `reduce` of gradients when ranks add them up."""

    kind: str
    param: str = "float32"
    compute: str = "float32"
    reduce: str = "float32"

    @property
    def loss_scaling(self) -> bool:
        """Whether the loss must be scaled so that small gradients survive: only float16's range needs it."""
        return self.compute == "float16"


PRECISIONS = {
    "fp64": Precision("fp64", "float64", "float64", "float64"),
    "fp32": Precision("fp32"),
    "bf16": Precision("bf16", compute="bfloat16"),
    "fp16": Precision("fp16", compute="float16"),
}
