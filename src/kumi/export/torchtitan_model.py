"""A model as Python code that builds it from torchtitan's layers, and the reasons why a model is not supported.

Checked against torchtitan 0.3.0: models/common/{config_utils,decoder,rope}.py, models/llama3, models/qwen3.
"""

from __future__ import annotations

from collections.abc import Iterator

from kumi.spec.model import Attention, ModelSpec, MoE, Rope
from kumi.spec.uniform_layers import UniformLayers, traits_beyond_llama, uniform_layers


def unsupported_model(model: ModelSpec) -> Iterator[str]:
    """Yield why torchtitan's Llama 3 and Qwen 3 cannot be `model`."""
    layers = uniform_layers(model)
    if layers is None or (layers.moe is not None and layers.dense is not None):
        yield (
            "the layers differ, or are not attention with an mlp each; torchtitan's Llama 3 and Qwen 3, to which kumi "
            "exports, have one kind of layer"
        )
        return
    if not isinstance(layers.attention, Attention):
        yield "latent attention: kumi exports to torchtitan's Llama 3 and Qwen 3, not to its DeepSeek-V3"
        return
    lacking = [
        feature for feature, present in _unsupported_features(model, layers, layers.attention).items() if present
    ]
    if lacking:
        yield f"torchtitan's Llama 3 and Qwen 3 have no {', '.join(lacking)}"
    yield from _unsupported_rope(layers.attention)


def _unsupported_features(model: ModelSpec, layers: UniformLayers, attention: Attention) -> dict[str, bool]:
    """Return features that torchtitan's layers lack -> whether the model has them."""
    dense, moe, layer = layers.dense, layers.moe, layers.layer
    return {
        "sliding windows": layers.window is not None,
        "biases": attention.qkv_bias or attention.out_bias or (dense is not None and dense.bias),
        "mlp other than SwiGLU": dense is not None and (dense.hidden_act != "silu" or not dense.gated),
        "layer norm": model.norm != "rmsnorm",
        "attention parallel to the mlp": layer.parallel,
        "norms after attention and mlp": layer.post_norms,
        "norm after the embedding": model.embedding_norm,
        "positions other than RoPE": attention.rope is None,
        "partial RoPE": attention.rotary_dim not in (0, attention.head_dim),
        "norm over all heads together": attention.qk_norm_whole,
        "attention sinks": attention.sinks,
        "experts unlike Qwen 3's (softmax of the scores, no shared expert, QK norm)": moe is not None
        and (not _is_qwen_moe(moe) or not attention.qk_norm),
        **traits_beyond_llama(model, layers),
    }


def _is_qwen_moe(moe: MoE) -> bool:
    plain = moe.scoring_func == "softmax" and moe.n_group == 1 and moe.routed_scaling_factor == 1.0
    return plain and not moe.shared_intermediate_size and not moe.bias and moe.hidden_act == "silu"


def _unsupported_rope(attention: Attention) -> Iterator[str]:
    """Yield why torchtitan's RoPE cannot be that of `attention`."""
    scaling = None if attention.rope is None else attention.rope.scaling
    if scaling in ("linear", "longrope"):
        yield f"rope scaling '{scaling}': torchtitan has plain RoPE, llama3 and yarn"
    if scaling == "llama3" and attention.qk_norm:
        yield "rope scaling 'llama3' with QK norm: torchtitan's Qwen 3 has plain RoPE and yarn"
    if scaling == "yarn" and attention.rope is not None and attention.rope.attention_factor not in (None, 1.0):
        yield "yarn with an attention_factor: torchtitan's Llama 3 and Qwen 3 do not apply it"


def torchtitan_model_code(model: ModelSpec) -> str:
    """Return code with imports and a function model_spec() that returns torchtitan's ModelSpec of `model`."""
    layers = uniform_layers(model)
    assert layers is not None, "unsupported_model() rejects other models"
    assert isinstance(layers.attention, Attention), "unsupported_model() rejects other models"
    qwen = layers.attention.qk_norm
    names = {
        "name": "qwen3" if qwen else "llama3",
        "Class": "Qwen3" if qwen else "Llama3",
        "parallelize": "parallelize_qwen3" if qwen else "parallelize_llama",
        "rope": "CosSinRoPE" if qwen else "ComplexRoPE",
        "hook": "register_moe_load_balancing_hook" if layers.moe is not None else "None",
    }
    return _TEMPLATE.format(
        **names,
        hook_import=_HOOK if layers.moe is not None else "",
        moe_imports=_MOE_IMPORTS if layers.moe is not None else "",
        dim=model.hidden_size,
        vocab=model.vocab_size,
        layers=model.num_hidden_layers,
        eps=model.norm_eps,
        std=model.initializer_range,
        tied=model.tie_word_embeddings,
        heads=layers.attention.num_attention_heads,
        kv_heads=layers.attention.num_key_value_heads,
        head_dim=layers.attention.head_dim,
        qk_norm="norm(head_dim)" if qwen else "None",
        rope_options=_rope(layers.attention.rope, model),
        feed_forward=_feed_forward(layers),
    )


def _rope(rope: Rope | None, model: ModelSpec) -> str:
    """Return the arguments of torchtitan's RoPE, as code."""
    assert rope is not None, "unsupported_model() rejects models without RoPE"
    options: dict[str, object] = {"max_seq_len": model.max_position_embeddings, "theta": rope.rope_theta}
    if rope.scaling == "llama3":
        options |= {
            "scaling": "llama",
            "scaling_factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    if rope.scaling == "yarn":
        options |= {
            "scaling": "yarn",
            "rope_factor": rope.factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "original_seq_len": rope.original_max_position_embeddings,
            "truncate": rope.truncate,
        }
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _feed_forward(layers: UniformLayers) -> str:
    """Return the argument for the feed-forward layer, dense or a mixture of experts, as code."""
    if layers.moe is None:
        assert layers.dense is not None
        size = layers.dense.intermediate_size
        return f"feed_forward=make_ffn_config(dim=dim, hidden_dim={size}, w1_param_init=linear, w2w3_param_init=linear)"
    moe = layers.moe
    experts = "{name: linear['weight'] for name in ('w1_EFD', 'w2_EDF', 'w3_EFD')}"
    return f"""moe=make_moe_config(
                num_experts={moe.num_experts},
                router=make_router_config(
                    dim=dim, num_experts={moe.num_experts}, gate_param_init=linear, top_k={moe.num_experts_per_tok},
                    score_func="softmax", route_norm={moe.norm_topk_prob},
                ),
                routed_experts=make_routed_experts_config(
                    dim=dim, hidden_dim={moe.moe_intermediate_size}, num_experts={moe.num_experts},
                    top_k={moe.num_experts_per_tok}, comm_backend="standard",
                    param_init={experts},
                ),
            )"""


_HOOK = "from torchtitan.components.optimizer import register_moe_load_balancing_hook\n"
_MOE_IMPORTS = "    make_moe_config,\n    make_routed_experts_config,\n    make_router_config,\n"
_TEMPLATE = """{hook_import}from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import {rope}, Embedding, Linear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
{moe_imports})
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.{name}.model import {Class}Model, {Class}TransformerBlock
from torchtitan.models.{name}.parallelize import {parallelize}
from torchtitan.models.{name}.state_dict_adapter import {Class}StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec


def model_spec() -> ModelSpec:
    \"\"\"The planned model.\"\"\"
    dim, vocab_size, head_dim = {dim}, {vocab}, {head_dim}
    normal = partial(nn.init.normal_, std={std})
    linear = {{"weight": normal, "bias": nn.init.zeros_}}

    def norm(size: int) -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=size, eps={eps}, param_init={{"weight": nn.init.ones_}})

    def layer() -> {Class}TransformerBlock.Config:
        return {Class}TransformerBlock.Config(
            attention_norm=norm(dim),
            ffn_norm=norm(dim),
            attention=make_gqa_config(
                dim=dim,
                n_heads={heads},
                n_kv_heads={kv_heads},
                head_dim=head_dim,
                fuse_qkv=True,
                qk_norm={qk_norm},
                wqkv_param_init=linear,
                wo_param_init=linear,
                inner_attention=get_attention_config("flex"),
                rope={rope}.Config(dim=head_dim, {rope_options}),
            ),
            {feed_forward},
        )

    tied = {tied}
    model = {Class}Model.Config(
        dim=dim,
        vocab_size=vocab_size,
        norm=norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init={{"weight": skip_param_init if tied else normal}},
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=linear),
        layers=[layer() for _ in range({layers})],
    )
    return ModelSpec(
        name="{name}",
        flavor="planned",
        model=model,
        parallelize_fn={parallelize},
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn={hook},
        state_dict_adapter={Class}StateDictAdapter,
    )
"""
