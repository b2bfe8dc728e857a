"""How a trainer carries a layout out: what it keeps, fuses and overlaps. Facts about programs, but for `dispatch`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """The traits of a trainer that decide memory and time. The default is kumi's own.

    `half_weights`: weights in the compute dtype are kept for good beside float32 masters, which then belong to the
    optimizer; else float32 weights are cast where they are used. `grad_itemsize`: bytes of an accumulated gradient
    element; `half_grads`: a gradient in the compute dtype is alive besides. `kernels`: element-wise work runs op by op
    ("eager"), in hand-written fused kernels, or compiled. `attention`: "flash" (Dao, 2023, arXiv:2307.08691), "flash-3"
    (Shah et al., 2024, arXiv:2407.08608, and others made for their device), "flash-1" (Dao et al., 2022,
    arXiv:2205.14135), or scores held in memory with or without a fused softmax.
    `logit_bytes`: bytes held for every logit of a microbatch; 0 where logits are formed chunk by chunk. `dropout`:
    masks are kept. `overlap_grads`, `overlap_params`, `overlap_tp`, `overlap_pp`: communication that runs beside
    compute; `scatter_sends`: ranks that share a tensor send a part of it each to the next stage, and gather it there;
    `grad_reduce_itemsize`: bytes an element that gradients travel in; `dispatch`: how many times as long as
    the device's bare launch interval the host takes for a kernel; `message_bytes`: size of the messages that gradients
    and weights travel in once a step, 0 for one message; `tokens_once`: a token goes once to a node, or a rank, that
    has several of its experts; `wide_ring`: gradients of keys and values go round context-parallel ranks in float32,
    else in the compute dtype. `source` says where the facts were read.

    What it keeps besides: `autograd`, kinds of element-wise work that are differentiated op by op, so that a "norm"
    keeps float32 copies and a "gate" every factor, where kernels of one's own keep their inputs only; `selective`, what
    selective recomputation spares: "products" (results of matrix products and attention), "half-products" (of every
    second product, and of attention) or "attention" (all but what is inside of attention); `cut_logit_bytes`, as
    `logit_bytes` where tp cuts the vocabulary, if that differs; `whole_logits`, ranks that cut it put all logits
    together; `bucket_bytes`, fixed buffers that gradients and parameters travel through; `update_itemsize`, bytes an
    element of a rank's part that the update copies in passing; `head_stays`, the gathered head is freed, and its
    gradient divided, only after the backward of all layers; `stage_output`, what a pipeline stage has sent on stays
    until its backward; `gathered_inputs`, under sequence parallelism matrices cut by columns keep their inputs as
    gathered, not the rank's part; `recompute_whole`, a layer that is recomputed sends its last message again, too, and
    the head's input is gathered again for the gradient of its weights; `nvme_params`, `offload = "states-nvme"` moves
    parameters and gradients on to the drives, too, and what passes through the host is of two of the largest units;
    else the optimizer's states alone go there, and pass through the rooms of `kumi.spec.techniques`.
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
    scatter_sends: bool = False
    grad_reduce_itemsize: int = 4
    dispatch: float = 1.0
    message_bytes: float = 0.0
    autograd: tuple[str, ...] = ()
    selective: str = "products"
    cut_logit_bytes: float = 0.0
    whole_logits: bool = False
    bucket_bytes: float = 0.0
    update_itemsize: int = 0
    head_stays: bool = True
    stage_output: bool = False
    gathered_inputs: bool = False
    tokens_once: bool = False
    wide_ring: bool = True
    recompute_whole: bool = False
    nvme_params: bool = False
    source: str = "kumi.parallel, kumi.nn"


KUMI = Engine()
