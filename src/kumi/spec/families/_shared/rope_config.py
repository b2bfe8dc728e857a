"""Read and write rotary embeddings (RoPE) in a config.json, in both formats.

transformers up to 4 writes `rope_theta` and `rope_scaling` (its type under "rope_type" or, older, "type");
transformers 5 writes one table, `rope_parameters`. The defaults of a scaling are filled in, so a `Rope` states
every parameter of its scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import Key, read
from kumi.spec.model import LatentAttention, Rope

# Keys of a RoPE table: those of every table, and those of each scaling.
_BASE = {
    "rope_type": Key("text or null", None),
    "type": Key("text or null", None),
    "rope_theta": Key("number or null", None),
}
_FACTOR, _ORIGINAL = {"factor": Key("number")}, "original_max_position_embeddings"
_YARN = {
    "factor": Key("number or null", None),
    _ORIGINAL: Key("integer or null", None),
    "beta_fast": Key("number or null", None),
    "beta_slow": Key("number or null", None),
    "attention_factor": Key("number or null", None),
    "mscale": Key("number or null", None),
    "mscale_all_dim": Key("number or null", None),
    "truncate": Key("true or false", True),
    # True if the model was trained with the scaling; no program reads this key.
    "finetuned": Key("true or false", True),
}
_LLAMA3 = {**_FACTOR, "low_freq_factor": Key("number"), "high_freq_factor": Key("number"), _ORIGINAL: Key("integer")}
_LONGROPE = {
    "factor": Key("number or null", None),
    _ORIGINAL: Key("integer or null", None),
    "attention_factor": Key("number or null", None),
    "short_factor": Key("list"),
    "long_factor": Key("list"),
}
# Type of scaling -> the keys of its table beside `_BASE`.
_SCALING_KEYS: dict[str, dict[str, Key]] = {
    "default": {},
    "linear": _FACTOR,
    "llama3": _LLAMA3,
    "yarn": _YARN,
    "longrope": _LONGROPE,
}
# Families that support LongRoPE; their readers check that there is one factor per pair of dims.
_LONGROPE_FAMILIES = ("phi3",)
# Names of LongRoPE in the first configs of these families.
_OLD_LONGROPE_NAMES = ("su", "yarn")

# The default base of transformers.
_DEFAULT_THETA = 10_000.0


def rope_from_hf(family: str, values: Mapping[str, Any]) -> Rope:
    """Return the RoPE in `values` (from `config_keys.read`); raise ModelError if its two formats disagree."""
    limit, theta = values["max_position_embeddings"], values["rope_theta"]
    old = _rope_of_table(family, values["rope_scaling"] or {}, theta, limit)
    if values["rope_parameters"] is None:
        return old
    new = _rope_of_table(family, values["rope_parameters"], theta, limit)
    if (values["rope_scaling"] is not None and new != old) or (theta is not None and new.rope_theta != theta):
        raise ModelError(
            f"config.json: rope_parameters={values['rope_parameters']!r} contradicts rope_theta={theta!r} "
            f"and rope_scaling={values['rope_scaling']!r}; keep one of them"
        )
    return new


def with_default_theta(values: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """Return `values`, with rope_theta=`theta` if they have no base; for families with another default base."""
    tables = [values[key] or {} for key in ("rope_parameters", "rope_scaling")]
    has_theta = values["rope_theta"] is not None or any(table.get("rope_theta") is not None for table in tables)
    return dict(values) if has_theta else {**values, "rope_theta": theta}


def mscale_all_dim(values: Mapping[str, Any]) -> float:
    """Return YaRN's mscale_all_dim, which scales the scores of latent attention; 0 if absent."""
    tables = [values[key] for key in ("rope_parameters", "rope_scaling") if values[key]]
    return float(next((table.get("mscale_all_dim") or 0.0 for table in tables), 0.0))


def mscales_to_hf(attention: LatentAttention) -> dict[str, float]:
    """Return the additional YaRN keys of latent attention, for readers without attention_factor.

    They compute it as m(mscale) / m(mscale_all_dim), with m(x) = 0.1 x ln(factor) + 1, or 1 if factor is at most 1.
    """
    rope, extends = attention.rope, attention.rope.factor > 1
    slope = 0.1 * math.log(rope.factor) if extends else 1.0
    scale = (rope.attention_factor or 1.0) * _mscale(rope.factor, attention.mscale_all_dim)
    mscale = round((scale - 1.0) / slope, 12) if extends else attention.mscale_all_dim
    return {"mscale": mscale, "mscale_all_dim": attention.mscale_all_dim}


def partial_rope_from_hf(family: str, values: Mapping[str, Any], share: float | None, default: float) -> Rope:
    """Return a partial RoPE, which rotates a fraction of each head.

    The fraction is `share`, or else partial_rotary_factor of a RoPE table, or else `default`. Raise ModelError if the
    config gives two fractions, or one that is not above 0 and at most 1.
    """
    tables = {key: dict(values[key]) if values[key] else None for key in ("rope_scaling", "rope_parameters")}
    given = {share} | {table.pop("partial_rotary_factor", None) for table in tables.values() if table}
    shares = [value for value in given if value is not None] or [default]
    if len(shares) > 1 or not isinstance(shares[0], (int, float)) or not 0 < shares[0] <= 1:
        raise ModelError(
            f"config.json: partial_rotary_factor, the share of each head that RoPE rotates in a {family} "
            f"model, is {' and '.join(map(repr, shares))}; give one number above 0 and at most 1"
        )
    return replace(rope_from_hf(family, {**values, **tables}), partial_rotary_factor=float(shares[0]))


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling`, the format that every version of transformers reads."""
    if rope.scaling is None:
        return {"rope_theta": rope.rope_theta, "rope_scaling": None}
    table = {"rope_type": rope.scaling, "factor": rope.factor}
    fields = [name for name in _SCALING_KEYS[rope.scaling] if hasattr(rope, name) and name != "factor"]
    values = {name: list(value) if isinstance(value := getattr(rope, name), tuple) else value for name in fields}
    return {"rope_theta": rope.rope_theta, "rope_scaling": table | {k: v for k, v in values.items() if v is not None}}


def ropes_by_layer_type(
    family: str, values: Mapping[str, Any], kinds: Sequence[str], theta: float = _DEFAULT_THETA
) -> dict[str, Rope]:
    """Return the RoPE of each layer type in `kinds`, each from its own table in `rope_parameters`.

    `theta` is the base for tables without one.
    """
    tables = values["rope_parameters"]
    if sorted(tables) != sorted(kinds) or not all(isinstance(table, dict) for table in tables.values()):
        raise ModelError(
            f"config.json: rope_parameters of a {family} model has {', '.join(map(repr, tables))}; it "
            f"must have a table for each of {' and '.join(kinds)}"
        )
    return {
        kind: rope_from_hf(family, with_default_theta({**values, "rope_parameters": tables[kind]}, theta))
        for kind in kinds
    }


def rope_parameters_to_hf(rope: Rope) -> dict[str, Any]:
    """Return the table that transformers 5 reads as `rope`."""
    written = rope_to_hf(rope)
    return {"rope_type": "default", **(written["rope_scaling"] or {}), "rope_theta": written["rope_theta"]}


def scaling_type(family: str, table: Mapping[str, Any]) -> str:
    """Return the scaling type that `table` names, under its current name."""
    kind = table.get("rope_type") or table.get("type") or "default"
    return "longrope" if family in _LONGROPE_FAMILIES and kind in _OLD_LONGROPE_NAMES else str(kind)


def _rope_of_table(family: str, table: Mapping[str, Any], theta: float | None, limit: int) -> Rope:
    """Return the RoPE of `table`, with the base `theta` if it has none; `limit` is max_position_embeddings.

    Raise ModelError for a scaling that kumi or the family does not support.
    """
    kind = scaling_type(family, table)
    if kind == "dynamic":
        raise ModelError(
            "config.json: rope type 'dynamic' changes with the length of the input, which kumi does not "
            "train; up to max_position_embeddings it equals no scaling: remove it"
        )
    supported = [name for name in _SCALING_KEYS if name != "longrope" or family in _LONGROPE_FAMILIES]
    if kind not in supported:
        raise ModelError(
            f"config.json: rope type {kind!r} of a {family} model is not supported; "
            f"kumi supports {', '.join(supported)}"
        )
    # The table may also have partial_rotary_factor: `read` accepts the values 1 and null, which have no
    # effect.
    values = read(f"{family} (rope type {kind})", table, _BASE | _SCALING_KEYS[kind])
    _check_positive({**values, "rope_theta": values["rope_theta"] if theta is None else theta})
    base = float(values["rope_theta"] or theta or _DEFAULT_THETA)
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, "linear", float(values["factor"]))
    if kind == "llama3":
        return Rope(
            base,
            "llama3",
            float(values["factor"]),
            values[_ORIGINAL],
            float(values["low_freq_factor"]),
            float(values["high_freq_factor"]),
        )
    return (_longrope if kind == "longrope" else _yarn)(base, values, limit)


def _longrope(base: float, values: Mapping[str, Any], limit: int) -> Rope:
    """Return LongRoPE; its attention_factor defaults to sqrt(1 + log(factor) / log(original context))."""
    original = values[_ORIGINAL] or limit
    factor = float(values["factor"] or limit / original)
    factors = []
    for name in ("short_factor", "long_factor"):
        numbers = values[name]
        if not numbers or not all(type(value) in (int, float) and 0 < value < math.inf for value in numbers):
            raise ModelError(
                f"config.json: {name}={numbers!r} of the rotary embedding must be numbers above 0; correct it"
            )
        factors.append(tuple(float(value) for value in numbers))
    attention = values["attention_factor"]
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(
        base,
        "longrope",
        factor,
        original,
        attention_factor=float(attention),
        short_factor=factors[0],
        long_factor=factors[1],
    )


def _check_positive(values: Mapping[str, Any]) -> None:
    """Raise ModelError if the base, a factor or the original context in `values` is not above 0."""
    for name in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", _ORIGINAL):
        value = values.get(name)
        if value is not None and value <= 0:
            raise ModelError(f"config.json: {name}={value} of the rotary embedding must be above 0; correct it")


def _yarn(base: float, values: Mapping[str, Any], limit: int) -> Rope:
    """Return YaRN with its defaults: beta_fast 32, beta_slow 1, attention_factor 0.1 log(factor) + 1."""
    original = values[_ORIGINAL] or limit
    factor = float(values["factor"] or limit / original)
    attention = values["attention_factor"]
    if attention is None and values["mscale"] and values["mscale_all_dim"]:
        attention = _mscale(factor, values["mscale"]) / _mscale(factor, values["mscale_all_dim"])
    elif attention is None:
        attention = _mscale(factor, 1.0)
    return Rope(
        base,
        "yarn",
        factor,
        original,
        beta_fast=float(values["beta_fast"] or 32),
        beta_slow=float(values["beta_slow"] or 1),
        attention_factor=float(attention),
        truncate=values["truncate"],
    )


def _mscale(factor: float, weight: float) -> float:
    """Return YaRN's scale of the attention for `factor`, with its logarithm multiplied by `weight`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
