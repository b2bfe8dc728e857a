"""What Hugging Face calls the parameters of a model: one value for each naming."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """Names of modules. Those of attention and mlp stand below `attention` and `mlp`, and these below the layer.

    A layer is `layers` and its number; empty names belong to parts that a naming's models do not have. `transposed`
    and `experts_transposed`: matrices (of experts) are stored as (in, out).
    """

    embedding: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    embedding_norm: str = "model.embed_norm"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    attention: str = "self_attn"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    qkv: str = "qkv_proj"
    out: str = "o_proj"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    router: str = "gate"
    shared_experts: str = "shared_experts"
    transposed: bool = False
    experts_transposed: bool = False


LLAMA = Names()
GEMMA = Names(attention_post_norm="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
              mlp_post_norm="post_feedforward_layernorm")  # fmt: skip
GPT_OSS = Names(router="router", experts_transposed=True)
GPT2 = Names(
    embedding="transformer.wte", positions="transformer.wpe", layers="transformer.h", norm="transformer.ln_f",
    attention_norm="ln_1", mlp_norm="ln_2", attention="attn", qkv="c_attn", out="c_proj", up="c_fc", down="c_proj",
    transposed=True,
)  # fmt: skip
GPT_NEOX = Names(
    embedding="gpt_neox.embed_in", layers="gpt_neox.layers", norm="gpt_neox.final_layer_norm", attention="attention",
    qkv="query_key_value", out="dense", up="dense_h_to_4h", down="dense_4h_to_h",
)  # fmt: skip
BLOOM = Names(
    embedding="transformer.word_embeddings", embedding_norm="transformer.word_embeddings_layernorm",
    layers="transformer.h", norm="transformer.ln_f", attention="self_attention", qkv="query_key_value", out="dense",
    up="dense_h_to_4h", down="dense_4h_to_h",
)  # fmt: skip
FALCON = Names(
    embedding="transformer.word_embeddings", layers="transformer.h", norm="transformer.ln_f",
    attention="self_attention", qkv="query_key_value", out="dense", up="dense_h_to_4h", down="dense_4h_to_h",
)  # fmt: skip
