"""Jobs and layouts for the tests of exports, with models of real sizes."""

from __future__ import annotations

from dataclasses import replace

from kumi.plan.engines import ENGINES
from kumi.spec.batch import BatchSpec
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS

LLAMA3_ROPE = Rope(500_000.0, "llama3", 8.0, 8192, 1.0, 4.0)


def dense(layers, hidden, heads, kv_heads, ffn, vocab, rope, family="llama", **more):
    """Return a model of equal layers, like Llama."""
    attention = Attention(heads, kv_heads, hidden // heads, rope)
    return ModelSpec(family, vocab, hidden, (LayerSpec(attention, MLP(ffn)),) * layers, 1e-5, 131_072, **more)


LLAMA2_7B = dense(32, 4096, 32, 32, 11_008, 32_000, Rope(10_000.0))
LLAMA3_8B = dense(32, 4096, 32, 8, 14_336, 128_256, LLAMA3_ROPE)
LLAMA3_70B = dense(80, 8192, 64, 8, 28_672, 128_256, LLAMA3_ROPE)
LLAMA_1B_TIED = dense(16, 2048, 32, 8, 8192, 128_256, Rope(500_000.0), tie_word_embeddings=True)

_QWEN = Attention(32, 4, 128, Rope(1_000_000.0), qk_norm=True)
QWEN3_8B = ModelSpec(
    "qwen3", 151_936, 4096, (LayerSpec(replace(_QWEN, num_key_value_heads=8), MLP(12_288)),) * 36, 1e-6, 40_960
)
QWEN3_MOE = ModelSpec("qwen3_moe", 151_936, 2048, (LayerSpec(_QWEN, MoE(128, 8, 768)),) * 48, 1e-6, 40_960)

_MLA = LatentAttention(
    128,
    1536,
    512,
    128,
    64,
    128,
    Rope(10_000.0, "yarn", 40.0, 4096, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0),
)
_V3 = MoE(
    256,
    8,
    2048,
    2048,
    scoring_func="sigmoid",
    n_group=8,
    topk_method="noaux_tc",
    topk_group=4,
    routed_scaling_factor=2.5,
)
DEEPSEEK_V3 = ModelSpec(
    "deepseek_v3", 129_280, 7168, (LayerSpec(_MLA, MLP(18_432)),) * 3 + (LayerSpec(_MLA, _V3),) * 58, 1e-6, 163_840
)

_WIDE = Attention(32, 8, 128, Rope(1_000_000.0))
MIXED_WINDOWS = ModelSpec(
    "mistral",
    131_072,
    4096,
    (LayerSpec(replace(_WIDE, sliding_window=1024), MLP(12_288)),) * 3 + (LayerSpec(_WIDE, MLP(12_288)),),
    1e-5,
    131_072,
)
MIXED_WINDOWS = replace(MIXED_WINDOWS, layers=MIXED_WINDOWS.layers * 9)

_GPT = Attention(25, 25, 64, None, qkv_bias=True, out_bias=True)
GPT2_XL = ModelSpec(
    "gpt2",
    50_257,
    1600,
    (LayerSpec(_GPT, MLP(6400, bias=True, hidden_act="gelu_new", gated=False)),) * 48,
    1e-5,
    1024,
    tie_word_embeddings=True,
    norm="layernorm",
    learned_positions=1024,
)


def job(model, devices, sequences, seq_len=4096, *, precision="bf16", engine="kumi", **optim):
    """Return the job of `model` on `devices` H100 in nodes of eight, with `sequences` per step."""
    per_node = min(8, devices)
    cluster = ClusterSpec("h100", Device("H100-SXM", "cuda", 80 << 30), per_node, devices // per_node)
    return Job(
        model, cluster, BatchSpec(seq_len, sequences * seq_len), PRECISIONS[precision], Optim(**optim), ENGINES[engine]
    )


# name -> (job, layout, the trainers that support it)
EVERYONE = ("megatron-lm", "megatron-bridge", "deepspeed", "accelerate-fsdp", "torchtitan", "nanotron")
MEGATRON = EVERYONE[:2]
EXAMPLES = {
    "ddp": (job(LLAMA2_7B, 8, 64), Layout(dp_replicate=8, microbatch=2), EVERYONE),
    "zero1": (
        job(LLAMA2_7B, 16, 128, warmup_steps=50),
        Layout(dp_shard=16, zero=1, microbatch=1),
        (*MEGATRON, "deepspeed", "nanotron"),
    ),
    "zero2": (
        job(LLAMA3_8B, 16, 128),
        Layout(dp_shard=16, zero=2, microbatch=1),
        (*MEGATRON, "deepspeed", "accelerate-fsdp", "torchtitan"),
    ),
    "fsdp": (
        job(LLAMA3_8B, 16, 128, 8192, schedule="linear", min_lr_ratio=0.0, warmup_steps=10),
        Layout(dp_shard=16, zero=3, microbatch=2, recompute="full"),
        (*MEGATRON, "deepspeed", "accelerate-fsdp", "torchtitan"),
    ),
    "hsdp": (
        job(QWEN3_8B, 32, 128, schedule="wsd", decay_steps=100),
        Layout(dp_replicate=4, dp_shard=8, zero=3, microbatch=1),
        (*MEGATRON, "accelerate-fsdp", "torchtitan"),
    ),
    "3d": (job(LLAMA3_70B, 64, 256), Layout(pp=4, dp_shard=2, tp=8, zero=1, recompute="selective"), MEGATRON),
    "3d-nanotron": (job(LLAMA2_7B, 64, 256), Layout(pp=4, dp_shard=4, tp=4, zero=1), (*MEGATRON, "nanotron")),
    "gpipe": (
        job(LLAMA2_7B, 16, 64, schedule="constant"),
        Layout(pp=2, dp_replicate=4, tp=2, schedule="gpipe"),
        ("torchtitan", "nanotron"),
    ),
    "interleaved": (
        job(LLAMA3_70B, 64, 256),
        Layout(pp=4, dp_shard=2, tp=8, zero=1, schedule="interleaved", stages=5),
        MEGATRON,
    ),
    "uneven": (
        job(LLAMA3_8B, 16, 64),
        Layout(pp=4, dp_replicate=2, tp=2, stage_layers=(7, 9, 9, 7)),
        (*MEGATRON, "torchtitan"),
    ),
    "4d": (
        job(LLAMA3_70B, 128, 128, 32_768),
        Layout(pp=2, dp_shard=4, cp=2, tp=8, zero=3, schedule="interleaved", stages=2),
        ("torchtitan",),
    ),
    "zb-v": (
        job(LLAMA3_8B, 8, 32, engine="torchtitan"),
        Layout(pp=4, dp_shard=2, zero=2, schedule="zb-v", stages=2),
        ("torchtitan",),
    ),
    "context": (
        job(LLAMA3_8B, 16, 16, 65_536),
        Layout(dp_shard=4, cp=4, zero=3, recompute="full"),
        (*MEGATRON, "accelerate-fsdp", "torchtitan"),
    ),
    "copies": (job(LLAMA3_8B, 16, 16, 65_536), Layout(dp_replicate=2, cp=8, zero=2), (*MEGATRON, "torchtitan")),
    "tp-fsdp": (
        job(LLAMA3_8B, 16, 64),
        Layout(dp_shard=8, tp=2, zero=3, sequence_parallel=False),
        (*MEGATRON, "deepspeed", "accelerate-fsdp", "torchtitan"),
    ),
    "moe": (job(QWEN3_MOE, 16, 64), Layout(dp_shard=16, ep=8, zero=3), (*MEGATRON, "deepspeed", "torchtitan")),
    "moe-3d": (
        job(QWEN3_MOE, 64, 256),
        Layout(pp=4, dp_shard=4, tp=4, ep=8, zero=1, recompute="full", recompute_layers=4),
        MEGATRON,
    ),
    "mla": (job(DEEPSEEK_V3, 1024, 4096), Layout(pp=16, dp_shard=64, ep=64, zero=1), MEGATRON),
    "windows": (job(MIXED_WINDOWS, 16, 64), Layout(pp=2, dp_shard=4, tp=2, zero=1), MEGATRON),
    "gpt2": (
        job(GPT2_XL, 8, 64, 1024, precision="fp16"),
        Layout(dp_shard=8, zero=2, microbatch=4),
        (*MEGATRON, "deepspeed", "accelerate-fsdp"),
    ),
    "offload": (
        job(LLAMA3_8B, 8, 32),
        Layout(dp_shard=8, zero=3, recompute="full", offload="states"),
        ("deepspeed", "accelerate-fsdp", "torchtitan"),
    ),
    "offload-optimizer": (
        job(LLAMA3_8B, 8, 32),
        Layout(dp_shard=8, zero=1, offload="optimizer"),
        (*MEGATRON, "deepspeed"),
    ),
    "offload-activations": (
        job(LLAMA3_8B, 8, 32),
        Layout(dp_shard=8, zero=3, recompute="full", offload="activations"),
        ("accelerate-fsdp",),
    ),
    "nvme": (job(LLAMA3_8B, 8, 32), Layout(dp_shard=8, zero=3, offload="states-nvme"), ("deepspeed",)),
    "one": (job(LLAMA_1B_TIED, 1, 8, precision="fp32"), Layout(), EVERYONE),
    "sgd": (
        job(LLAMA2_7B, 8, 64, kind="sgd", betas=(0.0, 0.0)),
        Layout(dp_shard=8, zero=2),
        (*MEGATRON, "deepspeed", "accelerate-fsdp"),
    ),
    "eight-bit": (
        job(LLAMA2_7B, 8, 64, kind="adamw-8bit"),
        Layout(dp_shard=8, zero=2),
        ("deepspeed", "accelerate-fsdp"),
    ),
}
