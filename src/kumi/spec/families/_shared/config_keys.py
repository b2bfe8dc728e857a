"""Check the keys of a config.json: each key is read, ignored for a stated reason, or refused by name.

A family declares its keys as a table of `Key`. `read` checks a config against this table, `IGNORED_KEYS` and
`_SUPPORTED_VALUES`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import brief
from kumi.spec.families._shared.bounds import check_bound

# The default of a key that has none.
REQUIRED: Any = object()


@dataclass(frozen=True)
class Key:
    """The type and default of a key.

    kind      a name in `_PYTHON_TYPES`, with " or null" after it if null is allowed
    default   value of an absent key; a `REQUIRED` key must be present
    """

    kind: str
    default: Any = REQUIRED


_OR_NULL = " or null"
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "true or false": (bool,),
    "text": (str,),
    "table": (dict,),
    "list": (list,),
    "integer or list of integers": (int, list),
}

# Keys of every decoder family. Defaults are those of the Hugging Face config classes; where they differ by family, the
# table has no default. Sizes never have a default: a wrong guess would train a model of another size.
DECODER = {
    "vocab_size": Key("integer"),
    "hidden_size": Key("integer"),
    "intermediate_size": Key("integer"),
    "num_hidden_layers": Key("integer"),
    "num_attention_heads": Key("integer"),
    "head_dim": Key("integer or null", None),
    "rms_norm_eps": Key("number"),
    "max_position_embeddings": Key("integer"),
    "initializer_range": Key("number", 0.02),
    "tie_word_embeddings": Key("true or false", False),
    "bos_token_id": Key("integer or null", None),
    "eos_token_id": Key("integer or list of integers or null", None),
    "pad_token_id": Key("integer or null", None),
    "rope_theta": Key("number or null", None),
    "rope_scaling": Key("table or null", None),
    "rope_parameters": Key("table or null", None),
}

# Tables that several families unpack before `read`.
TABLE_KEYS = {
    name: Key("table or null", None) for name in ("text_config", "vision_config", "rope_scaling", "rope_parameters")
}

# Keys of the router's auxiliary losses (MoE); they do not change the forward pass.
ROUTER_KEYS = {
    "output_router_logits": Key("true or false", False),
    "router_aux_loss_coef": Key("number or null", None),
    "router_jitter_noise": Key("number or null", None),
}

# Dropout rates of training; kumi trains without dropout.
_DROPOUT_KEYS = dict.fromkeys(
    (
        "attention_dropout",
        "attention_probs_dropout_prob",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "embedding_dropout",
        "hidden_dropout",
        "hidden_dropout_prob",
        "resid_pdrop",
        "residual_dropout",
        "summary_first_dropout",
    ),
    Key("number or null", None),
)

# Activation functions, with their names in Hugging Face.
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")

# Keys that do not affect the computation: reason -> keys.
IGNORED_KEYS = {
    "used earlier, to select the family": "model_type architectures",
    "the tensors carry their own dtype": "torch_dtype dtype",
    "runtime options of other programs": """
        use_cache output_past
        attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        experts_implementation _experts_implementation_internal _flash_attn_2_enabled torchscript
        output_attentions output_hidden_states return_dict use_return_dict return_dict_in_generate output_scores
        chunk_size_feed_forward tie_last_hidden_states""",
    "origin of the file": """
        _name_or_path name_or_path _commit_hash transformers_version transformers.js_config is_llama_config
        unsloth_fixed unsloth_version tokenizer_class prefix""",
    "labels of classifiers": "id2label label2id num_labels problem_type finetuning_task task_specific_params",
    "text generation; now in generation_config.json": """
        max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
        remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
        decoder_start_token_id sep_token_id cls_token_id max_matching_ngram_size""",
    "other frameworks": "use_bfloat16 tf_legacy_loss",
}
_IGNORED = frozenset(key for group in IGNORED_KEYS.values() for key in group.split())

# Keys that could change the computation: key -> the values that do not change it, the only ones that are accepted.
_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "quantization_config": (None,),
    "compression_config": (None,),
    "per_layer_config": (None,),
    "auto_map": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
}


def read(family: str, config: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, Any]:
    """Return the values of `keys` with defaults.

    Raise ModelError for a key that is unknown or missing, or whose value has another type or is not supported.
    """
    all_keys = {**_DROPOUT_KEYS, **keys}
    for name, value in config.items():
        if name in all_keys:
            _check_kind(family, name, value, all_keys[name].kind)
        elif name in _SUPPORTED_VALUES:
            _check_supported(family, name, value)
        elif name not in _IGNORED:
            raise ModelError(_unknown_key(family, name, value, keys))
    missing = [repr(name) for name, key in keys.items() if name not in config and key.default is REQUIRED]
    if missing:
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise ModelError(
            f"config.json: {', '.join(missing)} {are} missing; a {family} model cannot be built without {them}; "
            f"fetch the complete config.json"
        )
    return {name: config.get(name, key.default) for name, key in keys.items()}


def check_types(family: str, config: Mapping[str, Any], keys: Mapping[str, Key]) -> None:
    """Raise ModelError if a value in `config` has another type than `keys` gives, or exceeds the bound of its key."""
    for name, value in config.items():
        if name in keys:
            _check_kind(family, name, value, keys[name].kind)


def checked_activation(family: str, name: str, value: str) -> str:
    """Return `value`, which the key `name` has; raise ModelError unless it is one of `ACTIVATIONS`."""
    if value not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {name}={value!r} of a {family} model is not supported; "
            f"kumi supports {', '.join(ACTIVATIONS)}"
        )
    return value


def fixed_keys(values: Mapping[str, Any]) -> dict[str, Key]:
    """Return a key with the default `values[name]`, its only supported value, for each name.

    The reader of the family must check the values with `require_values`.
    """
    kinds = {str: "text", bool: "true or false", int: "integer", float: "number"}
    return {name: Key(kinds[type(value)], value) for name, value in values.items()}


def require_values(family: str, values: Mapping[str, Any], **allowed: Any) -> None:
    """Raise ModelError unless each key of `allowed` has its allowed value in `values`."""
    for name, value in allowed.items():
        if values[name] != value:
            raise ModelError(
                f"config.json: {name}={values[name]!r} of a {family} model is not supported, only "
                f"{value!r}, because kumi would compute a different model; use another model"
            )


def check_agrees(family: str, values: Mapping[str, Any], **expected: Any) -> None:
    """Raise ModelError if a key of `expected`, which transformers never reads, contradicts the other keys.

    The other keys imply the expected value. The key may also be absent or null.
    """
    for name, value in expected.items():
        if values[name] not in (None, value):
            raise ModelError(
                f"config.json: {name}={values[name]!r} of a {family} model contradicts the rest of the "
                f"config, which implies {value!r}; no program reads this key: remove it, or correct the rest"
            )


def _check_kind(family: str, name: str, value: Any, kind: str) -> None:
    """Raise ModelError unless `value`, under the key `name`, has the type `kind`, is finite and within its bound."""
    kind, nullable = kind.removesuffix(_OR_NULL), kind.endswith(_OR_NULL)
    if value is None and nullable:
        return
    # In Python a bool is an int.
    has_type = isinstance(value, _PYTHON_TYPES[kind]) and (bool in _PYTHON_TYPES[kind] or not isinstance(value, bool))
    if has_type and isinstance(value, list) and "integers" in kind:
        has_type = bool(value) and all(type(item) is int for item in value)
    check_bound(name, value)
    if has_type and isinstance(value, float) and not math.isfinite(value):
        raise ModelError(f"config.json: {name}={value} of a {family} model must be a finite number; correct it")
    if not has_type:
        raise ModelError(
            f"config.json: {name}={brief(value)} of a {family} model must be {_with_article(kind)}; correct it"
        )


def _with_article(kind: str) -> str:
    return kind if kind.startswith("true") else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _check_supported(family: str, name: str, value: Any) -> None:
    """Raise ModelError unless `value` is one of `_SUPPORTED_VALUES` for the key `name`."""
    allowed = _SUPPORTED_VALUES[name]
    if not any(value == option and (type(value) is not bool or type(option) is bool) for option in allowed):
        supported = " or ".join("null" if option is None else repr(option) for option in allowed)
        raise ModelError(
            f"config.json: {name}={brief(value)} of a {family} model is not supported, only {supported}, "
            f"because kumi would compute a different model; use another model"
        )


def _unknown_key(family: str, name: str, value: Any, keys: Mapping[str, Key]) -> str:
    """Return the message for the unknown key `name`, with the most similar key as a hint."""
    near = difflib.get_close_matches(name, [*keys, *_SUPPORTED_VALUES, *_DROPOUT_KEYS], n=1, cutoff=0.8)
    hint = f"did you mean {near[0]!r}?" if near else "remove it if it does not change what the model computes"
    return f"config.json: {brief(name)} ({brief(value)}) is not a key that kumi knows for a {family} model; {hint}"
