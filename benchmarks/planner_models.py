"""The models of published tables, from their dimensions or, where those are left out, by their names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from planner_defaults import CUT_LAYERS, GPT_VOCAB, HEADS_OF, LORA_RANK_OF, OTHER_ADAPTERS, first
from planner_rows import Run

from kumi.spec import ledger
from kumi.spec.lora import Lora
from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, ModelSpec, MoE, Rope

ROPE = Rope(10_000.0)


@dataclass(frozen=True)
class Shape:
    """What tables say of a model; `style` is "llama" (RMSNorm, rotation, gated layer), "gpt" (LayerNorm, biases,
    learned positions, one activation) or "nemotron" (LayerNorm, rotation, squared ReLU). Of layers with experts, the
    first `dense` have none; every other layer sees `window` positions where it is given."""

    style: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool = False
    head_dim: int | None = None
    moe: MoE | None = None
    dense: int = 0
    latent: tuple[int | None, int, int, int, int] | None = None
    window: int | None = None
    alibi: bool = False
    embedding_norm: bool = False


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more) -> Shape:
    return Shape("llama", layers, hidden, heads, kv_heads, ffn, vocab, **more)


def _gpt(layers: int, hidden: int, heads: int, vocab: int = GPT_VOCAB, **more) -> Shape:
    return Shape("gpt", layers, hidden, heads, more.pop("kv_heads", heads), 4 * hidden, vocab, tied=True, **more)


_QWEN, _LLAMA3 = 151936, 128256
_V3 = (1536, 512, 128, 64, 128)

# Names without anything but letters and digits, in lower case -> shape, each from the model's own configuration. The
# first whose name is the beginning of the run's counts, so that longer names stand first.
KNOWN = {
    "nanotronllama1b": _llama(16, 2048, 32, 32, 8192, 131072, tied=True),
    "nanotronllama3b": _llama(28, 3072, 32, 32, 8192, 131072, tied=True),
    "nanotronllama8b": _llama(32, 4096, 32, 32, 14336, 131072),
    "nanotronllama80b": _llama(80, 8192, 64, 64, 28672, 131072),
    "llama321b": _llama(16, 2048, 32, 8, 8192, _LLAMA3, tied=True),
    "llama323b": _llama(28, 3072, 24, 8, 8192, _LLAMA3, tied=True),
    "llama31405b": _llama(126, 16384, 128, 8, 53248, _LLAMA3),
    "llama3170b": _llama(80, 8192, 64, 8, 28672, _LLAMA3),
    "llama318b": _llama(32, 4096, 32, 8, 14336, _LLAMA3),
    "llama3405b": _llama(126, 16384, 128, 8, 53248, _LLAMA3),
    "llama370b": _llama(80, 8192, 64, 8, 28672, _LLAMA3),
    "llama38b": _llama(32, 4096, 32, 8, 14336, _LLAMA3),
    "llama4scout": _llama(48, 5120, 40, 8, 8192, 202048, moe=MoE(16, 1, 8192, 8192)),
    "llama270b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama213b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama27b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama65b": _llama(80, 8192, 64, 64, 22016, 32000),
    "llama30b": _llama(60, 6656, 52, 52, 17920, 32000),
    "llama33b": _llama(60, 6656, 52, 52, 17920, 32000),
    "llama13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "tinyllama": _llama(22, 2048, 32, 4, 5632, 32000),
    "smollm135m": _llama(30, 576, 9, 3, 1536, 49152, tied=True),
    "smollm360m": _llama(32, 960, 15, 5, 2560, 49152, tied=True),
    "smollm17b": _llama(24, 2048, 32, 32, 8192, 49152, tied=True),
    "smollm217b": _llama(24, 2048, 32, 32, 8192, 49152, tied=True),
    "smollm33b": _llama(36, 2048, 16, 4, 11008, _LLAMA3, tied=True),
    "mistral7b": _llama(32, 4096, 32, 8, 14336, 32000),
    "mixtral8x7b": _llama(32, 4096, 32, 8, 14336, 32000, moe=MoE(8, 2, 14336)),
    "mixtral8x22b": _llama(56, 6144, 48, 8, 16384, 32768, moe=MoE(8, 2, 16384)),
    "grok1": _llama(64, 6144, 48, 8, 32768, 131072, moe=MoE(8, 2, 32768)),
    "qwen2505b": _llama(24, 896, 14, 2, 4864, _QWEN, tied=True),
    "qwen2515b": _llama(28, 1536, 12, 2, 8960, _QWEN, tied=True),
    "qwen253b": _llama(36, 2048, 16, 2, 11008, _QWEN, tied=True),
    "qwen257b": _llama(28, 3584, 28, 4, 18944, 152064),
    "qwen2514b": _llama(48, 5120, 40, 8, 13824, 152064),
    "qwen2532b": _llama(64, 5120, 40, 8, 27648, 152064),
    "qwen2572b": _llama(80, 8192, 64, 8, 29568, 152064),
    "qwen3235b": _llama(94, 4096, 64, 4, 12288, _QWEN, head_dim=128, moe=MoE(128, 8, 1536)),
    "qwen330b": _llama(48, 2048, 32, 4, 6144, _QWEN, head_dim=128, moe=MoE(128, 8, 768)),
    "qwen306b": _llama(28, 1024, 16, 8, 3072, _QWEN, tied=True, head_dim=128),
    "qwen317b": _llama(28, 2048, 16, 8, 6144, _QWEN, tied=True, head_dim=128),
    "qwen34b": _llama(36, 2560, 32, 8, 9728, _QWEN, tied=True, head_dim=128),
    "qwen38b": _llama(36, 4096, 32, 8, 12288, _QWEN, head_dim=128),
    "qwen314b": _llama(40, 5120, 40, 8, 17408, _QWEN, head_dim=128),
    "qwen332b": _llama(64, 5120, 64, 8, 25600, _QWEN, head_dim=128),
    "deepseekv3": _llama(61, 7168, 128, 128, 18432, 129280, moe=MoE(256, 8, 2048, 2048), dense=3, latent=_V3),
    "deepseekv2": _llama(
        60, 5120, 128, 128, 12288, 102400, moe=MoE(160, 6, 1536, 3072), dense=1, latent=(1536, 512, 128, 64, 128)
    ),
    "deepseekmoe16b": _llama(
        27, 2048, 16, 16, 10944, 102400, moe=MoE(64, 6, 1408, 2816), dense=1, latent=(None, 512, 128, 64, 128)
    ),
    "kimik2": _llama(61, 7168, 64, 64, 18432, 163840, moe=MoE(384, 8, 2048, 2048), dense=1, latent=_V3),
    "gptoss120b": _llama(36, 2880, 64, 8, 2880, 201088, head_dim=64, moe=MoE(128, 4, 2880, bias=True), window=128),
    "gptoss20b": _llama(24, 2880, 64, 8, 2880, 201088, head_dim=64, moe=MoE(32, 4, 2880, bias=True), window=128),
    "yi34b": _llama(60, 7168, 56, 8, 20480, 64000),
    "olmo27b": _llama(32, 4096, 32, 32, 11008, 100352),
    "olmo213b": _llama(40, 5120, 40, 40, 13824, 100352),
    "olmo7b": _llama(32, 4096, 32, 32, 11008, 50304),
    "gemma7b": _llama(28, 3072, 16, 16, 24576, 256000, tied=True, head_dim=256),
    "gemma2b": _llama(18, 2048, 8, 1, 16384, 256000, tied=True, head_dim=256),
    "gemma29b": _llama(42, 3584, 16, 8, 14336, 256000, tied=True, head_dim=256),
    "gemma227b": _llama(46, 4608, 32, 16, 36864, 256000, tied=True, head_dim=128),
    "nemotron4340b": Shape("nemotron", 96, 18432, 96, 8, 73728, 256000),
    "nemotron415b": Shape("nemotron", 32, 6144, 48, 8, 24576, 256000),
    "gpt3175b": _gpt(96, 12288, 96),
    "gpt5b": _gpt(24, 4096, 32),
    "mingpt175b": _gpt(96, 12288, 96),
    "gpt2xl": _gpt(48, 1600, 25, 50257),
    "gpt2large": _gpt(36, 1280, 20, 50257),
    "gpt2medium": _gpt(24, 1024, 16, 50257),
    "gptneox20b": _gpt(44, 6144, 64, 50432),
    "opt175b": _gpt(96, 12288, 96, 50272),
    "opt66b": _gpt(64, 9216, 72, 50272),
    "opt30b": _gpt(48, 7168, 56, 50272),
    "opt13b": _gpt(40, 5120, 40, 50272),
    "opt67b": _gpt(32, 4096, 32, 50272),
    "bloom176b": _gpt(70, 14336, 112, 250880, alibi=True, embedding_norm=True),
    "falcon180b": _gpt(80, 14848, 232, 65024, kv_heads=8),
    "falcon40b": _gpt(60, 8192, 128, 65024, kv_heads=8),
}

# Names whose models the ledger cannot describe.
STRANGE = (
    (r"nemotron.?3|nemotron.?h|mamba|jamba|rwkv", "layers of a state-space model, which the ledger has not"),
    (r"\bt5|bert|whisper|llava|-vl\b|diffusion", "no decoder-only language model"),
)
GPT_NAMES = r"gpt|bloom|\bopt|neox|megatron|mt-nlg|turing|falcon|mpt"
LLAMA_NAMES = r"|llama|qwen|mistral|smollm|olmo|yi"

# Sequence lengths that models were defined with: the playbook's runs, GPT-2's and GPT-3's papers.
SEQ_LEN = ((r"nanotron", 4096), (r"gpt-?2", 1024), (r"gpt", 2048))


def model_of(run: Run) -> ModelSpec | str:
    """The model of a run with its adapters, or why there is none."""
    lora = lora_of(run)
    model = lora if isinstance(lora, str) else _whole_model(run)
    return model if isinstance(model, str) or lora is None else replace(model, lora=lora)


def lora_of(run: Run) -> Lora | str | None:
    """The adapters that a run trains, None where it trains all parameters; or why they cannot be described."""
    words = re.search(r"\b(q?)lora\b", run.text)
    if words is None:
        return "model: its adapters are not of low rank" if re.search(OTHER_ADAPTERS, run.text) else None
    stated = re.search(r"lora[^;]*?\b(?:rank|r|dim)[ =:]*(\d+)|\b(?:rank|r)[ =:]*(\d+)[^;]*lora", run.text)
    rank = int(stated.group(1) or stated.group(2)) if stated else first(LORA_RANK_OF, run.text)
    return Lora(r=rank, quantize="nf4" if words.group(1) else "")


def cut_layers(run: Run) -> int | None:
    """Layers of a model that its source cut short, None where it is whole. `params_B` is then the whole model's."""
    cut = next((match for words in CUT_LAYERS if (match := re.search(words, run.text))), None)
    return int(cut.group(1)) if cut else None


def _whole_model(run: Run) -> ModelSpec | str:
    """Known dimensions, overwritten by those in the row."""
    run = replace(run, layers=cut_layers(run) or run.layers, params=None if cut_layers(run) else run.params)
    name = run.model.lower()
    for pattern, reason in STRANGE:
        if re.search(pattern, name):
            return f"model: {reason}"
    plain = re.sub(r"[^a-z0-9]", "", name)
    shape_of_name = next((shape for key, shape in KNOWN.items() if plain.startswith(key)), None)
    shape = shape_of_name if shape_of_name is not None else _from_row(run)
    if shape is None:
        return "model: the row has no layers and hidden size, and its name is not known"
    given = {
        key: value
        for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        if (value := getattr(run, key)) is not None
    }
    if given.get("heads") and given.get("hidden", shape.hidden) % given["heads"] and shape.head_dim is None:
        # A slip of the table, which cannot have run; what the document says elsewhere counts.
        given |= dict.fromkeys(("heads", "kv_heads"), HEADS_OF.get(given.get("hidden", shape.hidden), given["heads"]))
    shape = replace(shape, **given)
    if (shape.hidden % shape.heads and shape.head_dim is None) or shape.heads % shape.kv_heads:
        return f"model: {shape.heads} heads ({shape.kv_heads} of keys) do not divide hidden size {shape.hidden}"
    if shape_of_name is not None:
        return build(shape, positions_of(run))
    named = re.search(GPT_NAMES + LLAMA_NAMES, run.model.lower()) is not None
    return _nearest(shape, positions_of(run), run.params, named)


def positions_of(run: Run) -> int:
    """Sequence length of a run: the column, what the notes say, or what the model was defined with."""
    match = re.search(r"seq(?:uence)?(?:_len| length)? (\d{3,7})", run.text)
    if run.seq_len or match:
        return run.seq_len or int(match.group(1))
    return next((length for words, length in SEQ_LEN if re.search(words, run.model.lower())), 0)


def _from_row(run: Run) -> Shape | None:
    """What a row's dimensions are completed to: heads of 128 but for models in `HEADS_OF`, as many of keys; a GPT's
    width of 4 hidden sizes and its vocabulary, or Llama's 8/3 and 32,000; a GPT's layers from its parameters."""
    gpt = re.search(GPT_NAMES, run.model.lower()) is not None
    if run.hidden is None or (run.layers is None and not (gpt and run.params)):
        return None
    heads = run.heads or (HEADS_OF.get(run.hidden) if gpt else None) or max(1, run.hidden // 128)
    ffn = run.ffn or (4 * run.hidden if gpt else -(-8 * run.hidden // 3 // 256) * 256)
    vocab = run.vocab or (GPT_VOCAB if gpt else 32000)
    layers = run.layers or max(1, round((run.params - vocab * run.hidden) / (2 * run.hidden * (2 * run.hidden + ffn))))
    alibi = re.search(r"mpt|bloom", run.model.lower()) is not None
    style = "gpt" if gpt else "llama"
    bloom = "bloom" in run.model.lower()
    return Shape(
        style, layers, run.hidden, heads, run.kv_heads or heads, ffn, vocab, gpt, alibi=alibi, embedding_norm=bloom
    )


@lru_cache(maxsize=4096)
def _nearest(shape: Shape, positions: int, params: float | None, named: bool) -> ModelSpec:
    """The model of `shape`, its head tied or not, and plain or gated where the name says nothing: whichever has nearest
    to as many parameters as the row says. Where it says nothing, as `shape` is."""
    if params is None:
        return build(shape, positions)
    styles = [shape.style] if named else ["llama", "gpt"]
    candidates = [
        build(replace(shape, tied=tied, style=style), positions)
        for style in styles
        for tied in (shape.tied, not shape.tied)
    ]
    return min(candidates, key=lambda spec: abs(parameters(spec) - params))


@lru_cache(maxsize=4096)
def parameters(model: ModelSpec) -> int:
    """How many parameters a model has; equal layers are counted once and multiplied."""
    of_layer = model.unique_layers()[1]
    parts = [(ops, of_layer.count(kind)) for kind, ops in enumerate(ledger.unique_layer_ops(model))]
    parts += [(ledger.embedding_ops(model), 1), (ledger.head_ops(model), 1)]
    return sum(count * param.numel for ops, count in parts for op in ops for param in op.params)


@lru_cache(maxsize=4096)
def build(shape: Shape, positions: int) -> ModelSpec:
    """The ModelSpec of `shape`; learned positions are as many as `positions`."""
    gpt = shape.style == "gpt"
    head_dim = shape.head_dim or shape.hidden // shape.heads
    rope = None if gpt else ROPE
    attention: Attention | LatentAttention = Attention(
        shape.heads, shape.kv_heads, head_dim, rope, qkv_bias=gpt, out_bias=gpt, alibi=shape.alibi
    )
    if shape.latent is not None:
        attention = LatentAttention(shape.heads, *shape.latent, ROPE)
    act = {"llama": "silu", "gpt": "gelu_new", "nemotron": "relu2"}[shape.style]
    mlp = MLP(shape.ffn, gpt, act, gated=shape.style == "llama")
    layers = []
    for index in range(shape.layers):
        layer_attention = attention
        if shape.window is not None and index % 2 == 0 and isinstance(layer_attention, Attention):
            layer_attention = replace(layer_attention, sliding_window=shape.window)
        layers.append(LayerSpec(layer_attention, shape.moe if shape.moe is not None and index >= shape.dense else mlp))
    return ModelSpec(
        family=shape.style,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        layers=tuple(layers),
        norm_eps=1e-5,
        max_position_embeddings=positions,
        tie_word_embeddings=shape.tied,
        norm="rmsnorm" if shape.style == "llama" else "layernorm",
        learned_positions=positions if gpt and not shape.alibi else 0,
        embedding_norm=shape.embedding_norm,
    )
