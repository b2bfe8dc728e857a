"""How replies are drawn: the flags of a user, over generation_config.json of the model, over transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import brief
from kumi.inference.sampling import Sampling

# Tokens of a reply where neither the user nor the model sets a number. (transformers takes 20.)
MAX_NEW_TOKENS = 256
# Where the model samples, transformers takes the 50 most likely tokens unless top_k is set.
TOP_K = 50
# Settings that kumi does not have, although they change which tokens are drawn -> their values that change nothing.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_new_tokens": (0,),
    "min_length": (0,),
    "encoder_repetition_penalty": (1.0,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
}


@dataclass(frozen=True)
class Flags:
    """The settings of a user; None where the model decides."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()


def resolve_sampling(flags: Flags, settings: Mapping[str, Any], stop_ids: frozenset[int]) -> Sampling:
    """Return the sampling of `flags`; for those that are None, of the model's `settings` (generation_config.json).

    As in transformers, a model is greedy unless its settings have do_sample, or a flag asks for sampling. Raise
    ConfigError for values out of range.
    """
    sampling_flags = (flags.temperature, flags.top_k, flags.top_p, flags.min_p)
    samples = settings.get("do_sample") is True or any(value is not None for value in sampling_flags)
    temperature = _chosen(flags.temperature, settings, "temperature", 1.0) if samples else 0.0
    greedy = temperature == 0
    return Sampling(
        max_new_tokens=int(_chosen(flags.max_new_tokens, settings, "max_new_tokens", MAX_NEW_TOKENS)),
        temperature=temperature,
        top_k=0 if greedy else int(_chosen(flags.top_k, settings, "top_k", TOP_K)),
        top_p=1.0 if greedy else _chosen(flags.top_p, settings, "top_p", 1.0),
        min_p=0.0 if greedy else _chosen(flags.min_p, settings, "min_p", 0.0),
        seed=flags.seed,
        stop_ids=stop_ids,
        stop_strings=flags.stop,
    )


def _chosen(flag: float | None, settings: Mapping[str, Any], key: str, default: float) -> float:
    """Return `flag`; if it is None the model's setting `key`, or else `default`."""
    if flag is not None:
        return flag
    value = settings.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"generation_config.json: {key}={brief(value)} must be a number; correct it, or set {key}")
    return value


def not_applied(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings of the model, as "key=value", that would change replies and that kumi does not have."""
    return [
        f"{key}={brief(settings[key])}"
        for key, harmless in _NOT_APPLIED.items()
        if settings.get(key) is not None and settings[key] not in harmless
    ]
