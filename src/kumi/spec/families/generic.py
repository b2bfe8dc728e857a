"""Models given by their dimensions alone, as tables of published runs give them.

`gpt` has the parts of GPT-3 and `llama` those of Llama, each with its parameters named as in Llama; what `llama` makes
is a Llama that can be trained.
"""

from __future__ import annotations

from kumi.errors import ModelError
from kumi.spec.families.bounds import check_model
from kumi.spec.families.common import check_sizes, grouped_attention
from kumi.spec.ledger import num_params
from kumi.spec.model import MLP, LayerSpec, ModelSpec, Rope

POSITIONS = ("learned", "rope", "alibi", "none")
NORMS = ("layernorm", "rmsnorm")


def gpt(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    seq_len: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    gated: bool = False,
    hidden_act: str = "gelu",
    norm: str = "layernorm",
    positions: str = "learned",
    tied: bool = True,
    bias: bool = True,
) -> ModelSpec:
    """A GPT of `layers` layers for sequences of up to `seq_len`; `ffn` is 4 x `hidden` unless it is given.

    `positions` is one of `POSITIONS`, `norm` one of `NORMS`.
    """
    _check_word("positions", positions, POSITIONS)
    _check_word("norm", norm, NORMS)
    width = 4 * hidden if ffn is None else ffn
    sizes = _sizes(layers, hidden, heads, kv_heads, width, vocab, seq_len)
    rope = Rope(10_000.0) if positions == "rope" else None
    attention = grouped_attention(sizes, rope, qkv_bias=bias, out_bias=bias, alibi=positions == "alibi")
    mlp = MLP(width, bias, "silu" if gated else hidden_act, gated=gated)
    spec = ModelSpec("gpt", vocab, hidden, (LayerSpec(attention, mlp),) * layers, 1e-5, seq_len, tied, norm=norm,
                     learned_positions=seq_len if positions == "learned" else 0)  # fmt: skip
    check_model(num_params(spec))
    return spec


def llama(
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    seq_len: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    rope_theta: float = 10_000.0,
) -> ModelSpec:
    """A Llama of `layers` layers for sequences of up to `seq_len`; a head has `hidden` / `heads` dims unless given."""
    sizes = _sizes(layers, hidden, heads, kv_heads, ffn, vocab, seq_len)
    attention = grouped_attention(sizes | {"head_dim": head_dim}, Rope(rope_theta))
    layer = LayerSpec(attention, MLP(ffn))
    spec = ModelSpec("llama", vocab, hidden, (layer,) * layers, 1e-5, seq_len, tied)
    check_model(num_params(spec))
    return spec


def _sizes(
    layers: int, hidden: int, heads: int, kv_heads: int | None, ffn: int, vocab: int, seq_len: int
) -> dict[str, int | None]:
    """The sizes under Hugging Face's names, checked."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
             "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
             "max_position_embeddings": seq_len}  # fmt: skip
    check_sizes(sizes)
    return sizes


def _check_word(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ModelError(f"{name}={value!r} of a gpt model is unknown; use one of {', '.join(allowed)}")
