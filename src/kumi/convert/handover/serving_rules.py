"""What vLLM and SGLang do with a model folder, read from their source: the table behind `kumi describe FOLDER`.

Nothing here was tried with the engines themselves. `docs/guides/hand-over.md` says which files were read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kumi.spec.model import LatentAttention, ModelSpec, MoE


@dataclass(frozen=True)
class Rule:
    """A property of models with which the engine's class of these `architectures` has trouble.

    refuses    True if the engine stops at it; False if it serves another function than that of the weights
    reason     completes "it ..."
    """

    architectures: frozenset[str]
    applies: Callable[[ModelSpec], bool]
    refuses: bool
    reason: str


@dataclass(frozen=True)
class Engine:
    """A serving engine: for architectures that kumi writes, by what class it serves them and where that class deviates.

    - `commit`: of the source that was read; "" where the package does not name it.
    - `own`: architectures with a class of the engine.
    - `transformers`: architectures served by the modules of transformers.
    - `classifiers`: architectures of reward models that are served with their score; None if that is every reward model
      whose decoder is in `own` or `transformers`.
    - `reward_note`: a setting that reward models need, or "".
    - `skipped`: architecture -> regular expression of the tensors that its class has no parameter for, and skips.
    - `unset`: architecture -> ends of names of parameters that its class always has. The class leaves them at arbitrary
      values where the files lack them, as with a head that is tied to the token embeddings.
    - `without_lora`: architectures whose class takes no adapters.
    - `lora_ranks`: the allowed values of its option for the largest rank; empty if it accepts any rank.
    - `saved_modules`: modules_to_save that it accepts in adapters; None if it does not read that key.
    - `ignored_keys`: keys of adapter_config.json that change the adapters' function and that it does not read.
    """

    name: str
    version: str
    commit: str
    own: frozenset[str]
    transformers: frozenset[str]
    classifiers: frozenset[str] | None
    reward_note: str
    skipped: Mapping[str, str]
    unset: Mapping[str, tuple[str, ...]]
    rules: tuple[Rule, ...]
    without_lora: frozenset[str]
    lora_ranks: tuple[int, ...]
    saved_modules: frozenset[str] | None
    ignored_keys: tuple[str, ...]


def _causal(*names: str) -> frozenset[str]:
    return frozenset(f"{name}ForCausalLM" for name in names)


def _windows(spec: ModelSpec) -> list[int | None]:
    """Return the sliding window of each attention layer; None for those without, or with one as long as the context."""
    windows = [getattr(layer.attention, "sliding_window", None) for layer in spec.layers if layer.attention]
    return [window if window and window < spec.max_position_embeddings else None for window in windows]


def _has_windows(spec: ModelSpec) -> bool:
    return any(_windows(spec))


def _windows_differ(spec: ModelSpec) -> bool:
    return len(set(_windows(spec))) > 1


def _windows_do_not_alternate(spec: ModelSpec) -> bool:
    """True unless windows are in layers 0, 2, 4 ... and nowhere else."""
    return any((window is None) != (index % 2 == 1) for index, window in enumerate(_windows(spec)))


def _activations(spec: ModelSpec) -> set[str]:
    return {layer.mlp.hidden_act for layer in spec.layers if layer.mlp}


def _moe_layers(spec: ModelSpec) -> list[MoE]:
    return [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoE)]


def _scales_differ(spec: ModelSpec) -> bool:
    return len({getattr(layer.attention, "score_scale", None) for layer in spec.layers}) > 1


def _rotates_halves(spec: ModelSpec) -> bool:
    """True if RoPE of latent attention rotates halves instead of neighbours."""
    return any(isinstance(x.attention, LatentAttention) and not x.attention.rope_interleave for x in spec.layers)


def _queries_grow(spec: ModelSpec) -> bool:
    ropes = [getattr(layer.attention, "rope", None) for layer in spec.layers]
    return any(rope is not None and rope.query_growth > 0 for rope in ropes)


def _not_yarn(spec: ModelSpec) -> bool:
    return any(getattr(getattr(layer.attention, "rope", None), "scaling", None) != "yarn" for layer in spec.layers)


_DEEPSEEK = _causal("DeepseekV2", "DeepseekV3")
_GPT2 = frozenset({"GPT2LMHeadModel"})
_MISTRAL3 = frozenset({"Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"})
_MULTIMODAL = frozenset(
    f"{name}ForConditionalGeneration" for name in ("Gemma3", "Mistral3", "Qwen2_5_VL", "Qwen3VL")
) | {"NemotronH_Omni_Reasoning_V3"}
_ATTENTION_BIAS = r"\.self_attn\.\w+\.bias$"

_NORMED_CHOICE = Rule(
    _causal("Olmoe"),
    lambda spec: any(moe.norm_topk_prob for moe in _moe_layers(spec)),
    False,
    "does not normalise the weights of the chosen experts, as norm_topk_prob asks",
)
_UNEQUAL_SCALES = Rule(_GPT2, _scales_differ, True, "accepts no scale_attn_by_inverse_layer_idx")

VLLM = Engine(
    name="vLLM",
    version="0.33.0",
    commit="4ba787ec9",
    own=_causal(
        *("Bloom", "Cohere2", "Falcon", "Gemma", "Gemma2", "Gemma3", "Glm4", "Glm4Moe", "GptOss", "Granite", "Llama"),
        *("Ministral3", "Mistral", "Mixtral", "NemotronH", "Olmoe", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"),
    )
    | _DEEPSEEK
    | _GPT2
    | _MULTIMODAL,
    transformers=_causal("GPTNeoX", "Ministral", "Olmo2", "Olmo3", "SeedOss", "SmolLM3", "Starcoder2"),
    classifiers=None,
    reward_note="""for scores without a sigmoid, start it with --pooler-config '{"use_activation": false}'""",
    skipped={
        "GemmaForCausalLM": _ATTENTION_BIAS,
        "Qwen3ForCausalLM": r"\.o_proj\.bias$",
        "Qwen3MoeForCausalLM": r"\.o_proj\.bias$",
        "Qwen3VLForConditionalGeneration": r"\.o_proj\.bias$",
        "Cohere2ForCausalLM": r"\.bias$|^lm_head\.weight$",
        **dict.fromkeys(_DEEPSEEK, _ATTENTION_BIAS),
    },
    unset=dict.fromkeys(_causal("GptOss", "Glm4Moe", "NemotronH", "Olmoe") | _DEEPSEEK, ("lm_head.weight",))
    | {"Qwen2MoeForCausalLM": (".q_proj.bias", ".k_proj.bias", ".v_proj.bias")},
    rules=(
        _NORMED_CHOICE,
        _UNEQUAL_SCALES,
        Rule(
            _causal("Qwen2", "Qwen3") | {"Qwen2_5_VLForConditionalGeneration"},
            _windows_differ,
            True,
            "accepts no sliding window in some layers only",
        ),
        Rule(
            _causal("Gemma2"),
            lambda spec: spec.head == "lm" and not spec.tie_word_embeddings,
            True,
            "has no head beside the token embeddings, and stops at lm_head.weight",
        ),
        Rule(_causal("GptOss"), _not_yarn, True, "reads the keys of YaRN from rope_parameters"),
        Rule(_causal("GptOss"), _windows_do_not_alternate, False, "has sliding windows in layers 0, 2, 4 ... only"),
        Rule(
            _causal("GptOss"),
            lambda spec: any(moe.act_limit != 7 for moe in _moe_layers(spec)),
            False,
            "clamps experts at 7, whatever swiglu_limit is",
        ),
        Rule(_DEEPSEEK, _rotates_halves, False, "rotates neighbours, whatever rope_interleave is"),
        Rule(_MISTRAL3, _queries_grow, False, "reads no llama_4_scaling_beta, which scales queries of long texts"),
    ),
    without_lora=_causal("Bloom", "Falcon") | _GPT2,
    lora_ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
    saved_modules=frozenset({"classifier", "score"}),
    ignored_keys=(),
)

SGLANG = Engine(
    name="SGLang",
    version="0.5.23",
    commit="",
    own=_causal(
        *("Cohere2", "Gemma", "Gemma2", "Gemma3", "Glm4", "Glm4Moe", "GptOss", "Granite", "Llama", "Ministral3"),
        *("Mistral", "Mixtral", "NemotronH", "Olmo2", "Olmoe", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"),
        "Starcoder2",
    )
    | _DEEPSEEK
    | _GPT2
    | _MULTIMODAL,
    transformers=_causal("GPTNeoX", "Ministral", "Olmo3", "SeedOss", "SmolLM3"),
    classifiers=frozenset(f"{name}ForSequenceClassification" for name in ("Gemma2", "Llama", "Qwen2", "Qwen3")),
    reward_note="",
    skipped={
        "LlamaForCausalLM": r"\.mlp\.\w+\.bias$",
        "GemmaForCausalLM": rf"{_ATTENTION_BIAS}|^lm_head\.weight$",
        "GraniteForCausalLM": r"\.\w+_proj\.bias$",
        "Cohere2ForCausalLM": r"\.bias$|^lm_head\.weight$",
        **dict.fromkeys(_causal("Gemma2", "Gemma3") | _GPT2, r"^lm_head\.weight$"),
        **dict.fromkeys(_DEEPSEEK, _ATTENTION_BIAS),
    },
    unset=dict.fromkeys(_causal("GptOss", "Glm4Moe", "Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe"), ("lm_head.weight",)),
    rules=(
        _NORMED_CHOICE,
        _UNEQUAL_SCALES,
        Rule(
            _causal("Mistral", "Mixtral", "Phi3", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Starcoder2")
            | _MISTRAL3
            | {"Qwen2_5_VLForConditionalGeneration"},
            _has_windows,
            False,
            "has no sliding window, so that texts longer than the window get other logits",
        ),
        Rule(_causal("Gemma2"), _windows_do_not_alternate, False, "has sliding windows in layers 0, 2, 4 ... only"),
        Rule(
            _causal("Gemma"),
            lambda spec: _activations(spec) != {"gelu"},
            False,
            "computes the exact GELU, not its tanh approximation",
        ),
        Rule(
            _GPT2,
            lambda spec: not _activations(spec) <= {"gelu_new", "gelu_pytorch_tanh"},
            False,
            "computes gelu_new, whatever activation_function is",
        ),
        Rule(
            _causal("Qwen2", "Qwen3"),
            lambda spec: spec.head == "score",
            False,
            "adds a bias to the score that no file has, the same for all texts",
        ),
    ),
    without_lora=frozenset(),
    lora_ranks=(),
    saved_modules=None,
    ignored_keys=("alpha_pattern", "modules_to_save", "rank_pattern", "use_rslora"),
)

ENGINES = (VLLM, SGLANG)
