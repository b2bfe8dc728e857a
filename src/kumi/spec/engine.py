"""The traits of a trainer that decide its memory and time: tensors it keeps, kernels it fuses, messages it overlaps.

All are facts about programs, except `dispatch`, which is measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """The traits of a trainer that decide memory and time. The defaults are kumi's own on a CPU.

    Memory:

    - `half_weights`: weights in the 16-bit compute dtype are resident in addition to float32 master weights, which
      belong to the optimizer; else float32 weights are cast at each use.
    - `grad_itemsize`: bytes of an accumulated gradient element.
    - `half_grads`: each parameter has a gradient in the compute dtype in addition to the accumulated one.
    - `logit_bytes`: bytes per logit of a microbatch; 0 if logits are computed chunk by chunk.
    - `cut_logit_bytes`: bytes per logit of a rank if tp shards the vocabulary; 0 if this, too, is `logit_bytes`.
    - `whole_logits`: the tp ranks, each with a shard of the vocabulary, all-gather the logits.
    - `dropout`: dropout masks are saved.
    - `autograd`: kinds of element-wise operations that autograd differentiates op by op, so that a "norm" saves float32
      copies and a "gate" every factor; custom kernels save only their inputs.
    - `selective`: the operations that selective recomputation does not repeat: "products" (matmuls and attention),
      "half-products" (every second matmul, and attention) or "attention" (everything outside of attention).
    - `bucket_bytes`: fixed communication buffers for gradients and parameters.
    - `update_itemsize`: bytes of temporary copies during the update, per element of a rank's shard.
    - `head_stays`: the head is part of FSDP's root unit, which is all-gathered before the first layer, and freed and
      reduced after the backward pass of all layers. A tied head always is.
    - `stage_output`: a pipeline stage keeps the activations that it has sent until their backward pass.
    - `gathered_inputs`: under sequence parallelism, column-parallel matrices save their all-gathered input
      instead of the rank's shard of it.
    - `nvme_params`: `offload = "states-nvme"` moves parameters and gradients to the drives as well, through host
      buffers of the size of the two largest FSDP units; else it moves only optimizer states, through the staging
      buffers of `kumi.spec.techniques`.

    Compute:

    - `kernels`: element-wise operations of a layer run op by op ("eager"), op by op but for PyTorch's fused norms
      ("fused-norms"), in hand-written fused kernels ("fused"), or compiled ("compiled").
    - `loss_kernels`: element-wise operations on logits: "eager", "fused" or "compiled" as above, or in kumi's Triton
      kernels ("triton").
    - `scan_kernels`: Mamba's scan runs op by op ("eager") or in one kernel ("fused").
    - `expert_kernels`: tokens are copied to the rows of their experts, and summed back, as in Megatron-Core
      ("megatron"), by kumi's PyTorch operations ("eager"), or in kumi's Triton kernels ("triton").
    - `fused_rotation`: a rotary position embedding runs in one kernel, whatever `kernels` says.
    - `attention`: "flash" (Dao, 2023, arXiv:2307.08691), "flash-3" (Shah et al., 2024, arXiv:2407.08608, and other
      kernels written for their device), "flash-1" (Dao et al., 2022, arXiv:2205.14135), "pytorch" ("flash-3" for whole
      rows, for which PyTorch has cuDNN's kernel, and "flash" for documents, windows and context parallelism), or the
      scores in memory, with a fused softmax ("fused-softmax") or without ("eager").
    - `whole_rows`: attention crosses the documents of a row, a sequence of the batch.
    - `dispatch`: time that the host takes per kernel, as a multiple of the device's bare launch interval.
    - `recompute_whole`: a recomputed layer repeats its last collective as well, and the head's input is all-gathered a
      second time for the gradient of its weights.

    Communication:

    - `overlap_grads`, `overlap_params`, `overlap_tp`, `overlap_pp`: True for each kind of communication that
      overlaps with computation.
    - `scatter_sends`: ranks that hold the same tensor each send a part of it to the next stage, which all-gathers it.
    - `grad_reduce_itemsize`: bytes per element of gradients in messages.
    - `message_bytes`: size of the messages in which gradients and weights are sent once per step; 0 if all are sent in
      one message.
    - `tokens_once`: a token is sent once to a node, or a rank, that has several of its experts.
    - `wide_ring`: ring attention sends the gradients of keys and values in float32; else in the compute dtype.

    `stack`: "fsdp" if the trainer builds on PyTorch's FSDP or its like, "megatron" if on Megatron-LM's 3D parallelism.
    `source` names the origin of these facts.
    """

    name: str = "kumi"
    stack: str = "fsdp"
    half_weights: bool = False
    grad_itemsize: int = 4
    half_grads: bool = False
    kernels: str = "eager"
    loss_kernels: str = "eager"
    scan_kernels: str = "eager"
    expert_kernels: str = "megatron"
    fused_rotation: bool = False
    attention: str = "flash"
    whole_rows: bool = False
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
    head_stays: bool = False
    stage_output: bool = False
    gathered_inputs: bool = False
    tokens_once: bool = False
    wide_ring: bool = True
    recompute_whole: bool = False
    nvme_params: bool = False
    source: str = "kumi.parallel, kumi.nn"


KUMI = Engine()
