"""How a config.json is read: every key is read, or ignored for a stated reason, or refused by name.

A family declares what it reads as a table of `Key`; `read` checks a config against the table, `IGNORED` and `NEUTRAL`.
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

REQUIRED: Any = object()


@dataclass(frozen=True)
class Key:
    """What a key may hold and what its absence means.

    `kind` is one of `KINDS`, followed by "?" where null is allowed; an absent key without a default is an error.
    """

    kind: str
    default: Any = REQUIRED


KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "true or false": (bool,),
    "text": (str,),
    "table": (dict,),
    "list": (list,),
    "integer or list of integers": (int, list),
}

# What every family of this package reads. The defaults are those of the Hugging Face config classes, which differ by
# family where there is none here. Sizes have none in any: a model of another size than meant would be trained.
DECODER = {
    "vocab_size": Key("integer"),
    "hidden_size": Key("integer"),
    "intermediate_size": Key("integer"),
    "num_hidden_layers": Key("integer"),
    "num_attention_heads": Key("integer"),
    "head_dim": Key("integer?", None),
    "rms_norm_eps": Key("number"),
    "max_position_embeddings": Key("integer"),
    "initializer_range": Key("number", 0.02),
    "tie_word_embeddings": Key("true or false", False),
    "bos_token_id": Key("integer?", None),
    "eos_token_id": Key("integer or list of integers?", None),
    "pad_token_id": Key("integer?", None),
    "rope_theta": Key("number?", None),
    "rope_scaling": Key("table?", None),
    "rope_parameters": Key("table?", None),
}

# Tables that several families take apart before `read`, when there are any.
TABLES = {name: Key("table?", None) for name in ("text_config", "vision_config", "rope_scaling", "rope_parameters")}

# What models with routed experts have besides, none of which changes the forward pass: weights of auxiliary losses.
ROUTER_LOSS = {
    "output_router_logits": Key("true or false", False),
    "router_aux_loss_coef": Key("number?", None),
    "router_jitter_noise": Key("number?", None),
}

# How much of what is dropped in training. That is the trainer's choice, and this one drops nothing.
DROPOUT = dict.fromkeys(
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
    Key("number?", None),
)

# Activation functions, as Hugging Face calls them.
ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2")

# Keys that do not say what the model computes, by the reason.
IGNORED = {
    "found the family before this reader was chosen": "model_type architectures",
    "the tensors carry their own dtype": "torch_dtype dtype",
    "how a program of the past ran the model": """
        use_cache output_past
        attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        experts_implementation _experts_implementation_internal _flash_attn_2_enabled torchscript
        output_attentions output_hidden_states return_dict use_return_dict return_dict_in_generate output_scores
        chunk_size_feed_forward tie_last_hidden_states""",
    "where the file comes from": """
        _name_or_path name_or_path _commit_hash transformers_version transformers.js_config is_llama_config
        unsloth_fixed unsloth_version tokenizer_class prefix""",
    "labels of classifiers": "id2label label2id num_labels problem_type finetuning_task task_specific_params",
    "how text is generated; generation_config.json has it now": """
        max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
        temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
        encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
        remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
        decoder_start_token_id sep_token_id cls_token_id max_matching_ngram_size""",
    "other frameworks": "use_bfloat16 tf_legacy_loss",
}
_IGNORED = frozenset(key for group in IGNORED.values() for key in group.split())

# Keys that would change what the model computes: only the values that change nothing are accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
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
    """The value of each of `keys`, defaults filled in; ModelError for an unknown, missing or mistyped one."""
    known = {**DROPOUT, **keys}
    for name, value in config.items():
        if name in known:
            _check_kind(family, name, value, known[name].kind)
        elif name in NEUTRAL:
            _check_neutral(family, name, value)
        elif name not in _IGNORED:
            raise ModelError(_unknown(family, name, value, keys))
    missing = [repr(name) for name, key in keys.items() if name not in config and key.default is REQUIRED]
    if missing:
        are, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise ModelError(
            f"config.json: {', '.join(missing)} {are} missing; a {family} model cannot be built without {them}"
        )
    return {name: config.get(name, key.default) for name, key in keys.items()}


def check_types(family: str, config: Mapping[str, Any], keys: Mapping[str, Key]) -> None:
    """Raise ModelError when a value of `config` is not of the type that `keys` gives, or beyond its bound."""
    for name, value in config.items():
        if name in keys:
            _check_kind(family, name, value, keys[name].kind)


def activation(family: str, name: str, value: str) -> str:
    """`value` of the key `name`, when it is an activation function whose cost is known."""
    if value not in ACTIVATIONS:
        raise ModelError(
            f"config.json: {name}={value!r} of a {family} model is not supported; kumi knows {', '.join(ACTIVATIONS)}"
        )
    return value


def fixed(values: Mapping[str, Any]) -> dict[str, Key]:
    """Return the keys of `values`, which published configs have although nothing but their one value is computed; the
    family's reader holds them to it (see `neutral`)."""
    kinds = {str: "text", bool: "true or false", int: "integer", float: "number"}
    return {name: Key(kinds[type(value)], value) for name, value in values.items()}


def neutral(family: str, values: Mapping[str, Any], **allowed: Any) -> None:
    """Nothing, when each of `allowed` has that value in `values`; ModelError for one that changes what is computed."""
    for name, value in allowed.items():
        if values[name] != value:
            raise ModelError(
                f"config.json: {name}={values[name]!r} of a {family} model is not supported, only "
                f"{value!r}; kumi would plan for something else than this model"
            )


def unread(family: str, values: Mapping[str, Any], **meant: Any) -> None:
    """Raise ModelError unless each key of `meant`, which configs have and transformers never reads, is absent from
    `values`, null, or says what the model is."""
    for name, value in meant.items():
        if values[name] not in (None, value):
            raise ModelError(
                f"config.json: {name}={values[name]!r} of a {family} model contradicts the rest, which "
                f"makes it {value!r}; no program reads it: remove it, or correct the rest"
            )


def _check_kind(family: str, name: str, value: Any, kind: str) -> None:
    kind, nullable = kind.removesuffix("?"), kind.endswith("?")
    if value is None and nullable:
        return
    # In Python a bool is an int.
    right = isinstance(value, KINDS[kind]) and (bool in KINDS[kind] or not isinstance(value, bool))
    if right and isinstance(value, list) and "integers" in kind:
        right = bool(value) and all(type(item) is int for item in value)
    check_bound(name, value)
    if right and isinstance(value, float) and not math.isfinite(value):
        raise ModelError(f"config.json: {name}={value} of a {family} model must be a finite number; correct it")
    if not right:
        raise ModelError(f"config.json: {name}={brief(value)} of a {family} model must be {_article(kind)}; correct it")


def _article(kind: str) -> str:
    return kind if kind.startswith("true") else f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _check_neutral(family: str, name: str, value: Any) -> None:
    allowed = NEUTRAL[name]
    if not any(value == option and (type(value) is not bool or type(option) is bool) for option in allowed):
        says = " or ".join("null" if option is None else repr(option) for option in allowed)
        raise ModelError(
            f"config.json: {name}={brief(value)} of a {family} model is not supported, only {says}; "
            f"kumi would compute something else than this model"
        )


def _unknown(family: str, name: str, value: Any, keys: Mapping[str, Key]) -> str:
    near = difflib.get_close_matches(name, [*keys, *NEUTRAL, *DROPOUT], n=1, cutoff=0.8)
    hint = f"did you mean {near[0]!r}?" if near else "remove it if it does not change what the model computes"
    return f"config.json: {brief(name)} ({brief(value)}) is not a key that kumi knows for a {family} model; {hint}"
