"""How a trainer carries a layout out: what it keeps, fuses and overlaps. Facts about programs, none of them fitted."""

from __future__ import annotations

from dataclasses import dataclass

KERNELS = ("eager", "fused", "compiled")
ATTENTION = ("flash", "flash-1", "fused-softmax", "eager")


@dataclass(frozen=True)
class Engine:
    """The traits of a trainer that decide memory and time. The default is kumi's own.

    `half_weights`: weights in the compute dtype are kept for good beside float32 masters, which then belong to the
    optimizer; else float32 weights are cast where they are used. `grad_itemsize`: bytes of an accumulated gradient
    element; `half_grads`: a gradient in the compute dtype is alive besides. `kernels`: element-wise work runs op by op
    ("eager"), in hand-written fused kernels, or compiled. `attention`: "flash" (Dao, 2023, arXiv:2307.08691),
    "flash-1" (Dao et al., 2022, arXiv:2205.14135), or scores held in memory with or without a fused softmax.
    `logit_bytes`: bytes held for every logit of a microbatch; 0 where logits are formed chunk by chunk. `dropout`:
    masks are kept. `overlap_grads`, `overlap_params`, `overlap_tp`, `overlap_pp`: communication that runs beside
    compute; `grad_reduce_itemsize`: bytes an element that gradients travel in; `dispatch`: how many times as long as
    the device's bare launch interval the host takes for a kernel. `source` says where the facts were
    read.
    """

    name: str = "kumi"
    half_weights: bool = False
    grad_itemsize: int = 4
    half_grads: bool = False
    kernels: str = "eager"
    attention: str = "flash"
    logit_bytes: float = 0.0
    dropout: bool = False
    overlap_grads: bool = True
    overlap_params: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = True
    grad_reduce_itemsize: int = 4
    dispatch: float = 1.0
    source: str = "kumi.parallel, kumi.nn"


KUMI = Engine()
