"""Vision-language models: kumi reads the language model, and copies all other weights unchanged (passthrough).

The config.json keys of the other parts (`vision_config`, ids of special tokens) are stored in the spec as JSON and
written back. For text alone, the positions in time, height and width are the same number, so multimodal RoPE equals
plain RoPE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config
from kumi.spec.families._shared.config_keys import IGNORED_KEYS
from kumi.spec.model import ModelSpec

# Keys that may occur outside and inside text_config; if they differ, text_config wins.
_SHARED_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
# How multimodal RoPE assigns dims to its three positions, which has no effect where the three are the same.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
# `rope_config.with_default_theta` reads these three keys, which text_config may lack.
_NO_ROPE_KEYS = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}
# Keys that may differ, because no reader uses them.
_IGNORED_KEYS = {key for group in IGNORED_KEYS.values() for key in group.split()}


@dataclass(frozen=True)
class VisionLanguageFamily:
    """A family of vision-language models.

    text_families           family of the language model, by model_type of text_config; the first is the default
    passthrough_keys        keys of config.json about the passthrough parts
    passthrough_prefixes    name prefixes of the passthrough tensors
    prefixes                name prefixes of the language model's tensors (see `Weights`)
    defaults                values of keys that text_config lacks
    default_theta           RoPE base if text_config has none; None for the text family's own default
    either_ties             embeddings are tied if tie_word_embeddings is true at the top level or in text_config; else
                            the key at the top level wins
    unsupported_text_keys   keys that the text family writes and this family does not have
    """

    family: str
    architecture: str
    text_families: Mapping[str, ModuleType]
    passthrough_keys: tuple[str, ...]
    passthrough_prefixes: tuple[str, ...]
    prefixes: tuple[tuple[str, str], ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_theta: float | None = None
    either_ties: bool = False
    unsupported_text_keys: tuple[str, ...] = ()

    def from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        """Return the spec of the language model in `config`."""
        kind, (text, outer) = self._kind(config), self._split(config)
        tables = {key: dict(text[key]) for key in ("rope_scaling", "rope_parameters") if text.get(key)}
        rotation = {key: table.pop(key) for table in tables.values() for key in _MROPE_KEYS if key in table}
        for table in tables.values():
            table |= {key: "default" for key in ("type", "rope_type") if table.get(key) == "mrope"}
        text = {**self.defaults, **text, **tables}
        text = (
            text
            if self.default_theta is None
            else rope_config.with_default_theta(_NO_ROPE_KEYS | text, self.default_theta)
        )
        refused = next((key for key in self.unsupported_text_keys if text.get(key)), None)
        if refused:
            raise ModelError(
                f"config.json: {refused}={text[refused]!r} in text_config of a {self.family} model is not supported; "
                f"remove it"
            )
        read_text: ModelSpec = self.text_families[kind].from_hf(text)
        weights = replace(read_text.weights, prefixes=self.prefixes, base="", passthrough=self.passthrough_prefixes)
        passthrough = {key: outer[key] for key in self.passthrough_keys if key in outer}
        return replace(
            read_text,
            family=self.family,
            weights=weights,
            carried_config=json.dumps([kind, passthrough, rotation], sort_keys=True),
            notes=(*read_text.notes, self._note()),
        )

    def to_hf(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the config.json of `spec`, with the stored keys of its passthrough parts."""
        if not spec.carried_config:
            raise ModelError(
                f"this {self.family} model has no configuration of its vision parts; read it from a config.json, or "
                f"use the family of its language model"
            )
        kind, passthrough, rotation = json.loads(spec.carried_config)
        written: dict[str, Any] = self.text_families[kind].to_hf(spec)
        omitted = (*self.unsupported_text_keys, "architectures", "tie_word_embeddings")
        text = {key: value for key, value in written.items() if key not in omitted} | {"model_type": kind}
        if rotation:
            text["rope_scaling"] = (text["rope_scaling"] or {"rope_type": "default"}) | rotation
        return {
            "architectures": [self.architecture],
            "model_type": self.family,
            "tie_word_embeddings": spec.tie_word_embeddings,
            "text_config": text,
            **passthrough,
        }

    def _kind(self, config: Mapping[str, Any]) -> str:
        """Return the model_type of the language model, one of `text_families`."""
        kind, supported = (config.get("text_config") or {}).get("model_type"), list(self.text_families)
        if kind not in supported and kind is not None and len(supported) > 1:
            raise ModelError(
                f"config.json: model_type={kind!r} of the text_config of a {self.family} model is not "
                f"supported; kumi supports {', '.join(supported)}"
            )
        return str(kind) if kind in supported else supported[0]

    def _split(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split `config` into the keys of the language model and of the passthrough parts.

        The language model's keys are in text_config or, in older configs, at the top level.
        """
        outer = {key: value for key, value in config.items() if key in self.passthrough_keys}
        flat = {key: value for key, value in config.items() if key not in (*self.passthrough_keys, "text_config")}
        inner = dict(config.get("text_config") or {})
        candidates = (flat.pop("tie_word_embeddings", None), inner.pop("tie_word_embeddings", None))
        ties = [value for value in candidates if value is not None]
        tied = {"tie_word_embeddings": any(ties) if self.either_ties else ties[0]} if ties else {}
        for key in set(flat) & set(inner) - {*_SHARED_KEYS, *_IGNORED_KEYS}:
            if flat[key] != inner[key]:
                raise ModelError(
                    f"config.json: {key}={flat[key]!r} differs from {inner[key]!r} in text_config; remove one of them"
                )
        text = {**flat, **{key: value for key, value in inner.items() if key not in self.passthrough_keys}}
        if "vision_config" not in outer:
            raise ModelError(
                f"config.json: 'vision_config' is missing; a {self.family} model needs one; "
                f"fetch the complete config.json"
            )
        return text | tied, outer

    def _note(self) -> str:
        names = ", ".join(f"{prefix}*" for prefix in self.passthrough_prefixes)
        return f"{names} are passthrough tensors: copied unchanged, not computed, not trained, not counted"
