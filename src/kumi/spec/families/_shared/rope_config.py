"""Rotary embeddings in a config.json, both spellings.

transformers up to 4 writes `rope_theta` beside `rope_scaling` (whose kind is under "rope_type" or, older, "type");
transformers 5 writes one table, `rope_parameters`. What a scaling leaves out is filled in here: a `Rope` is whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import Key, read
from kumi.spec.model import LatentAttention, Rope

_BASE = {"rope_type": Key("text?", None), "type": Key("text?", None), "rope_theta": Key("number?", None)}
_FACTOR, _ORIGINAL = {"factor": Key("number")}, "original_max_position_embeddings"
_YARN = {
    "factor": Key("number?", None),
    _ORIGINAL: Key("integer?", None),
    "beta_fast": Key("number?", None),
    "beta_slow": Key("number?", None),
    "attention_factor": Key("number?", None),
    "mscale": Key("number?", None),
    "mscale_all_dim": Key("number?", None),
    "truncate": Key("true or false", True),
    # Whether the model was trained with it; no program reads that.
    "finetuned": Key("true or false", True),
}
_LLAMA3 = {**_FACTOR, "low_freq_factor": Key("number"), "high_freq_factor": Key("number"), _ORIGINAL: Key("integer")}
_LONGROPE = {
    "factor": Key("number?", None),
    _ORIGINAL: Key("integer?", None),
    "attention_factor": Key("number?", None),
    "short_factor": Key("list"),
    "long_factor": Key("list"),
}
SCALINGS: dict[str, dict[str, Key]] = {
    "default": {},
    "linear": _FACTOR,
    "llama3": _LLAMA3,
    "yarn": _YARN,
    "longrope": _LONGROPE,
}
# Whose readers see to it that there are as many factors as pairs.
LONGROPE_FAMILIES = ("phi3",)
# What their first configs called it.
LONGROPE_NAMES = ("su", "yarn")

# What transformers assumes where a config names no base.
DEFAULT_THETA = 10_000.0


def from_hf(family: str, values: Mapping[str, Any]) -> Rope:
    """The rotary embedding in `values` (what `keys.read` returned), in one spelling or, where they agree, both."""
    limit, theta = values["max_position_embeddings"], values["rope_theta"]
    old = _table(family, values["rope_scaling"] or {}, theta, limit)
    if values["rope_parameters"] is None:
        return old
    new = _table(family, values["rope_parameters"], theta, limit)
    if (values["rope_scaling"] is not None and new != old) or (theta is not None and new.rope_theta != theta):
        raise ModelError(
            f"config.json: rope_parameters={values['rope_parameters']!r} contradicts rope_theta={theta!r} "
            f"and rope_scaling={values['rope_scaling']!r}; keep one of them"
        )
    return new


def with_base(values: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """`values` with the base `theta`, for families that assume another than `DEFAULT_THETA` where none is given."""
    tables = [values[key] or {} for key in ("rope_parameters", "rope_scaling")]
    said = values["rope_theta"] is not None or any(table.get("rope_theta") is not None for table in tables)
    return dict(values) if said else {**values, "rope_theta": theta}


def mscale_all_dim(values: Mapping[str, Any]) -> float:
    """The YaRN key of latent attention that lengthens all scores; 0 where it is not given."""
    tables = [values[key] for key in ("rope_parameters", "rope_scaling") if values[key]]
    return float(next((table.get("mscale_all_dim") or 0.0 for table in tables), 0.0))


def mscales_to_hf(attention: LatentAttention) -> dict[str, float]:
    """The YaRN keys that latent attention has besides, for readers that know no attention_factor."""
    found, grows = attention.rope, attention.rope.factor > 1
    slope = 0.1 * math.log(found.factor) if grows else 1.0
    scale = (found.attention_factor or 1.0) * _mscale(found.factor, attention.mscale_all_dim)
    mscale = round((scale - 1.0) / slope, 12) if grows else attention.mscale_all_dim
    return {"mscale": mscale, "mscale_all_dim": attention.mscale_all_dim}


def partial_from_hf(family: str, values: Mapping[str, Any], share: float | None, default: float) -> Rope:
    """`from_hf` for families that turn a part of every head: `share` of it, or what a table says, or `default`."""
    tables = {key: dict(values[key]) if values[key] else None for key in ("rope_scaling", "rope_parameters")}
    said = {share} | {table.pop("partial_rotary_factor", None) for table in tables.values() if table}
    shares = [value for value in said if value is not None] or [default]
    if len(shares) > 1 or not isinstance(shares[0], (int, float)) or not 0 < shares[0] <= 1:
        raise ModelError(
            f"config.json: the share of each head that a {family} model turns is "
            f"{' and '.join(map(repr, shares))}; give one number above 0 and at most 1"
        )
    return replace(from_hf(family, {**values, **tables}), partial_rotary_factor=float(shares[0]))


def to_hf(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the spelling that every version of transformers reads."""
    if rope.scaling is None:
        return {"rope_theta": rope.rope_theta, "rope_scaling": None}
    table = {"rope_type": rope.scaling, "factor": rope.factor}
    fields = [name for name in SCALINGS[rope.scaling] if hasattr(rope, name) and name != "factor"]
    values = {name: list(value) if isinstance(value := getattr(rope, name), tuple) else value for name in fields}
    return {"rope_theta": rope.rope_theta, "rope_scaling": table | {k: v for k, v in values.items() if v is not None}}


def by_kind(
    family: str, values: Mapping[str, Any], kinds: Sequence[str], theta: float = DEFAULT_THETA
) -> dict[str, Rope]:
    """Return the rotation of each of `kinds` of layers, of which `rope_parameters` has a table each; `theta` is the
    base where a table names none."""
    tables = values["rope_parameters"]
    if sorted(tables) != sorted(kinds) or not all(isinstance(table, dict) for table in tables.values()):
        raise ModelError(
            f"config.json: rope_parameters of a {family} model has {', '.join(map(repr, tables))}; it "
            f"must have a table for each of {' and '.join(kinds)}"
        )
    return {kind: from_hf(family, with_base({**values, "rope_parameters": tables[kind]}, theta)) for kind in kinds}


def table_to_hf(rope: Rope) -> dict[str, Any]:
    """Return the table that transformers 5 reads as `rope`."""
    written = to_hf(rope)
    return {"rope_type": "default", **(written["rope_scaling"] or {}), "rope_theta": written["rope_theta"]}


def kind_of(family: str, table: Mapping[str, Any]) -> str:
    """Return the kind of scaling that `table` names, under today's name."""
    kind = table.get("rope_type") or table.get("type") or "default"
    return "longrope" if family in LONGROPE_FAMILIES and kind in LONGROPE_NAMES else str(kind)


def _table(family: str, table: Mapping[str, Any], theta: float | None, limit: int) -> Rope:
    kind = kind_of(family, table)
    if kind == "dynamic":
        raise ModelError(
            "config.json: rope type 'dynamic' changes with the length of the input, which training cannot "
            "follow; up to max_position_embeddings it equals no scaling: remove it"
        )
    known = [one for one in SCALINGS if one != "longrope" or family in LONGROPE_FAMILIES]
    if kind not in known:
        raise ModelError(
            f"config.json: rope type {kind!r} of a {family} model is not supported; kumi knows {', '.join(known)}"
        )
    # partial_rotary_factor may stand in the table, too: `read` accepts its neutral value.
    values = read(f"{family} (rope type {kind})", table, _BASE | SCALINGS[kind])
    _check_positive({**values, "rope_theta": values["rope_theta"] if theta is None else theta})
    base = float(values["rope_theta"] or theta or DEFAULT_THETA)
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
    """LongRoPE, whose softmax temperature grows with the root of 1 + log(factor) / log(original context)."""
    original = values[_ORIGINAL] or limit
    factor = float(values["factor"] or limit / original)
    factors = []
    for name in ("short_factor", "long_factor"):
        one = values[name]
        if not one or not all(type(value) in (int, float) and 0 < value < math.inf for value in one):
            raise ModelError(f"config.json: {name}={one!r} of the rotary embedding must be numbers above 0; correct it")
        factors.append(tuple(float(value) for value in one))
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
    for name in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", _ORIGINAL):
        value = values.get(name)
        if value is not None and value <= 0:
            raise ModelError(f"config.json: {name}={value} of the rotary embedding must be above 0; correct it")


def _yarn(base: float, values: Mapping[str, Any], limit: int) -> Rope:
    """YaRN with its defaults: 32 and 1 rotations, and a softmax temperature that grows with log(factor)."""
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
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
