"""The memory and performance traits of other trainers, so that the planner can estimate layouts for them.

    ENGINES["megatron-lm"]  ->  the traits of current Megatron-Core

`kumi.spec.engine.Engine` describes the traits. Its defaults are kumi's on a CPU; each entry names the differences. The
facts were read in the trainers' documentation and code, which `source` cites. A trainer's switch has its default
setting, or the setting in the trainer's published benchmark recipes. No source states `dispatch`, the host time per
kernel. It was fitted to the smallest published runs, which are host-bound: SC'21's smallest model, BLOOM's, nanotron's,
and Llama 3 8B of Megatron-Bridge.
"""

from __future__ import annotations

from dataclasses import replace

from kumi.spec.engine import KUMI, Engine

# Megatron-Core has bfloat16 weights, accumulates float32 gradients inside the weight-gradient matmul, and leaves
# float32 master weights to the optimizer. The loss saves float32 probabilities, bfloat16 logits and their gradient.
_MEGATRON = Engine(
    name="megatron-lm",
    stack="megatron",
    whole_rows=True,
    recompute_whole=True,
    half_weights=True,
    kernels="fused",
    scan_kernels="fused",
    attention="flash-3",
    logit_bytes=8.0,
    scatter_sends=True,
    message_bytes=160e6,
    dispatch=4.0,
    selective="attention",
    wide_ring=False,
    source=(
        "Megatron-LM core_r0.8 to r0.12: optimizer/, distributed/param_and_grad_buffer.py, tensor_parallel/"
        "cross_entropy.py; README's scaling runs set --overlap-grad-reduce and --overlap-param-gather; Transformer "
        "Engine layers with fused attention"
    ),
)

# DeepSpeed's pipeline engine reduces gradients after the last microbatch, in buckets of 5e8 elements, and keeps the
# output of a stage until its backward pass. Its float16 optimizer with ZeRO-1 accumulates gradients in float16, and
# copies a rank's shard of them to float32 for the update.
_MEGATRON_DEEPSPEED = replace(
    _MEGATRON,
    name="megatron-deepspeed",
    recompute_whole=True,
    grad_itemsize=2,
    bucket_bytes=1e9,
    update_itemsize=4,
    stage_output=True,
    attention="fused-softmax",
    overlap_grads=False,
    overlap_params=False,
    overlap_pp=False,
    grad_reduce_itemsize=2,
    message_bytes=1e9,
    dispatch=9.5,
    source=(
        "bigscience-workshop/Megatron-DeepSpeed: megatron/model/{transformer,fused_softmax}.py; deepspeed/runtime/pipe/"
        "engine.py reduces after the last backward; deepspeed/runtime/zero/stage_1_and_2.py"
    ),
)

# FSDP2 shards float32 weights and all-gathers them in bfloat16; the final norm and the head form a separate FSDP unit.
# The compiled loss has bfloat16 logits and their gradient, and with tp also float32 probabilities. Selective
# recomputation keeps the result of every second matmul.
_TORCHTITAN = Engine(
    name="torchtitan",
    whole_rows=True,
    kernels="compiled",
    loss_kernels="compiled",
    scan_kernels="fused",
    logit_bytes=4.0,
    cut_logit_bytes=8.0,
    overlap_pp=False,
    dispatch=3.0,
    autograd=("norm", "gate"),
    selective="half-products",
    source=(
        "pytorch/torchtitan: distributed/ (MixedPrecisionPolicy param bfloat16, reduce float32), components/loss.py "
        "(float32 cross entropy), torch.compile for each block; async TP is a switch, off by default"
    ),
)

# FSDP1 and DeepSpeed with transformers run eager blocks, and cross entropy on float32 logits.
_ACCELERATE = replace(
    _TORCHTITAN,
    name="accelerate-fsdp",
    kernels="eager",
    loss_kernels="eager",
    scan_kernels="eager",
    logit_bytes=14.0,
    cut_logit_bytes=0.0,
    selective="products",
    head_stays=True,
    source=(
        "huggingface/accelerate FullyShardedDataParallelPlugin with bf16 mixed precision (parameters, reductions and "
        "buffers in bfloat16) and transformers' eager blocks, whose loss upcasts the logits"
    ),
    grad_reduce_itemsize=2,
)

ENGINES: dict[str, Engine] = {
    "kumi": KUMI,
    "megatron-lm": _MEGATRON,
    # NVIDIA's benchmark recipes reduce gradients in bfloat16, overlap TP matmuls with their communication, and use the
    # loss of Transformer Engine, which overwrites the logits with their gradient. HybridEP or DeepEP dispatches tokens
    # to experts.
    "megatron-bridge": replace(
        _MEGATRON,
        name="megatron-bridge",
        overlap_tp=True,
        tokens_once=True,
        loss_kernels="fused",
        logit_bytes=4.0,
        grad_itemsize=2,
        grad_reduce_itemsize=2,
        source=(
            "NVIDIA-NeMo/Megatron-Bridge scripts/performance (grad_reduce_in_fp32 off, tp_comm_overlap on, CUDA graphs "
            "in most recipes, moe_flex_dispatcher_backend); NeMo's megatron_gpt_config.yaml before it (grad_sync_dtype "
            "bf16, ub_tp_comm_overlap)"
        ),
    ),
    # The version of the paper at SC'21: softmax, bias and dropout are fused by hand, training is in float16 with
    # dropout 0.1, and gradients are all-reduced after the backward pass.
    "megatron-lm-2021": replace(
        _MEGATRON,
        name="megatron-lm-2021",
        attention="fused-softmax",
        dropout=True,
        overlap_grads=False,
        overlap_params=False,
        overlap_pp=False,
        grad_reduce_itemsize=2,
        dispatch=9.0,
        source=(
            "Narayanan et al., 2021, arXiv:2104.04473, sections 4 and 5, and Megatron-LM v2.x: megatron/model/"
            "{fused_softmax,fused_bias_gelu,distributed}.py, dropout 0.1 in arguments.py, float16 gradients"
        ),
    ),
    "megatron-deepspeed": _MEGATRON_DEEPSPEED,
    # The bfloat16 optimizer accumulates gradients in float32 beside a microbatch's gradients; both are unsharded.
    "megatron-deepspeed-bf16": replace(
        _MEGATRON_DEEPSPEED,
        name="megatron-deepspeed-bf16",
        grad_itemsize=4,
        half_grads=True,
        bucket_bytes=2e9,
        update_itemsize=0,
        source=(
            "deepspeed/runtime/bf16_optimizer.py, engine.py (buffered_allreduce_fallback); BigScience's chronicles of "
            "28 February 2022: 4 bytes a parameter more than with float16, not divided"
        ),
    ),
    # The head all-gathers the logits of the full vocabulary, and the loss keeps them in bfloat16, as float32
    # log-probabilities, and as two gradients. Norms and MLPs are differentiated op by op, the attention output is
    # saved a second time in the projection's memory order, and gradients are accumulated in bfloat16.
    "scaling": replace(
        _MEGATRON,
        name="scaling",
        recompute_whole=True,
        grad_itemsize=2,
        kernels="eager",
        scan_kernels="eager",
        autograd=("norm", "gate", "attention"),
        logit_bytes=14.0,
        whole_logits=True,
        stage_output=True,
        gathered_inputs=True,
        overlap_grads=False,
        overlap_params=False,
        overlap_pp=False,
        scatter_sends=False,
        grad_reduce_itemsize=2,
        source=(
            "Hagemann et al., 2023, arXiv:2311.05610; Aleph-Alpha/scaling: transformer/model/{layers/lm_head,losses/"
            "cross_entropy}.py, core/nn/{mlp,attention/attention}.py, core/optimizer/optimizer.py"
        ),
    ),
    # A bfloat16 gradient is alive beside the accumulated float32 gradient. TP communication is not overlapped, and
    # reductions wait for the single hardware queue (nanotron requires CUDA_DEVICE_MAX_CONNECTIONS=1): the runs of its
    # grid with data parallelism take the sum of compute and communication time.
    "nanotron": Engine(
        name="nanotron",
        stack="megatron",
        whole_rows=True,
        recompute_whole=True,
        half_weights=True,
        half_grads=True,
        autograd=("norm", "gate"),
        selective="attention",
        logit_bytes=14.0,
        overlap_grads=False,
        overlap_params=False,
        overlap_pp=False,
        message_bytes=25e6,
        dispatch=6.7,
        source=(
            "huggingface/nanotron v0.5: optim/gradient_accumulator.py (float32 accumulation), models/llama.py, and in "
            "parallel/ pipeline_parallel/{engine,p2p}.py (blocking sends), tensor_parallel/nn.py (reduce-scatter mode)"
        ),
    ),
    "torchtitan": _TORCHTITAN,
    # Before February 2025 the loss was not compiled, and kept float32 log-probabilities and two gradients. With tp,
    # loss_parallel also keeps the exponentials and their product.
    "torchtitan-2024": replace(
        _TORCHTITAN,
        name="torchtitan-2024",
        loss_kernels="eager",
        logit_bytes=12.0,
        cut_logit_bytes=20.0,
        source="pytorch/torchtitan v0.1: train.py (loss_fn not compiled); torch/distributed/tensor/parallel/loss.py",
    ),
    # "PURE" mixed precision: parameters, gradients and reductions in bfloat16 over float32 shards.
    "llm-foundry": replace(
        _TORCHTITAN,
        name="llm-foundry",
        kernels="fused",
        loss_kernels="fused",
        autograd=(),
        selective="products",
        head_stays=True,
        attention="flash-1",
        cut_logit_bytes=0.0,
        grad_reduce_itemsize=2,
        source=(
            "mosaicml/llm-foundry scripts/train/benchmarking: FSDP FULL_SHARD, mixed_precision PURE, triton flash "
            "attention, low_precision_layernorm, loss_fn fused_crossentropy; composer's trainer"
        ),
    ),
    # Reductions start as buckets fill (overlap_comm); prefetching hides only part of the all-gathers of ZeRO-3.
    "deepspeed": replace(
        _ACCELERATE,
        name="deepspeed",
        half_weights=True,
        nvme_params=True,
        source=(
            "deepspeed/runtime/zero/{stage_1_and_2,stage3}.py: bfloat16 weights with float32 partitions, overlap_comm, "
            "prefetch buckets; transformers' eager blocks"
        ),
    ),
    "accelerate-fsdp": _ACCELERATE,
}
