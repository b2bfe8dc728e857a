"""Language models inside of models that see: their text is read, and all else is carried along as it is.

What config.json says of the rest (`vision_config`, numbers of special tokens) is kept as text, so that the way back
says it again. Text alone has the same position in time, height and width, so that rotation by three positions is plain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import rope_config
from kumi.spec.families._shared.config_keys import IGNORED
from kumi.spec.model import ModelSpec

# What both the model and its text may say; where they differ, what the text says counts.
SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
# How a rotation is shared out among three positions; of no effect where they are equal.
SECTIONS = ("mrope_section", "mrope_interleaved")
NO_ROTATION = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}
# Keys that may differ, for nobody reads them.
UNREAD = {key for group in IGNORED.values() for key in group.split()}


@dataclass(frozen=True)
class Seeing:
    """A family of models that see: its text is a model of one of `texts` (by the model_type of text_config; else of the
    first), with `defaults` where the text says nothing.

    Without a base of its own its rotation has `theta`, where that is not None. Whether the head is the embedding is
    said outside of the text, else in it; with `either_ties` one of them is enough.

    `kept` are keys of config.json about what is carried along, `beginnings` those of its tensors' names. Names of the
    text's tensors begin as `prefixes` say (see `Weights`). `unsaid` are keys that the text's family writes and this one
    has no words for.
    """

    family: str
    architecture: str
    texts: Mapping[str, ModuleType]
    kept: tuple[str, ...]
    beginnings: tuple[str, ...]
    prefixes: tuple[tuple[str, str], ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    theta: float | None = None
    either_ties: bool = False
    unsaid: tuple[str, ...] = ()

    def from_hf(self, config: Mapping[str, Any]) -> ModelSpec:
        """The text of the model that `config` describes."""
        kind, (text, outer) = self._kind(config), self._split(config)
        tables = {key: dict(text[key]) for key in ("rope_scaling", "rope_parameters") if text.get(key)}
        rotation = {key: table.pop(key) for table in tables.values() for key in SECTIONS if key in table}
        for table in tables.values():
            table |= {key: "default" for key in ("type", "rope_type") if table.get(key) == "mrope"}
        text = {**self.defaults, **text, **tables}
        text = text if self.theta is None else rope_config.with_base(NO_ROTATION | text, self.theta)
        refused = next((key for key in self.unsaid if text.get(key)), None)
        if refused:
            raise ModelError(
                f"config.json: {refused}={text[refused]!r} is not supported of a {self.family} model; remove it"
            )
        read_text: ModelSpec = self.texts[kind].from_hf(text)
        weights = replace(read_text.weights, prefixes=self.prefixes, base="", carried=self.beginnings)
        kept = {key: outer[key] for key in self.kept if key in outer}
        return replace(
            read_text,
            family=self.family,
            weights=weights,
            carried_config=json.dumps([kind, kept, rotation], sort_keys=True),
            notes=(*read_text.notes, self._note()),
        )

    def to_hf(self, spec: ModelSpec) -> dict[str, Any]:
        """The config.json of `spec`, with what it said of the parts that are carried along."""
        if not spec.carried_config:
            raise ModelError(
                f"this {self.family} model says nothing of what it sees with; read it from a config.json, "
                f"or use the family of its text"
            )
        kind, kept, rotation = json.loads(spec.carried_config)
        written: dict[str, Any] = self.texts[kind].to_hf(spec)
        unsaid = (*self.unsaid, "architectures", "tie_word_embeddings")
        text = {key: value for key, value in written.items() if key not in unsaid} | {"model_type": kind}
        if rotation:
            text["rope_scaling"] = (text["rope_scaling"] or {"rope_type": "default"}) | rotation
        return {
            "architectures": [self.architecture],
            "model_type": self.family,
            "tie_word_embeddings": spec.tie_word_embeddings,
            "text_config": text,
            **kept,
        }

    def _kind(self, config: Mapping[str, Any]) -> str:
        """Which of `texts` the text is."""
        said, known = (config.get("text_config") or {}).get("model_type"), list(self.texts)
        if said not in known and said is not None and len(known) > 1:
            raise ModelError(
                f"config.json: model_type={said!r} of the text_config of a {self.family} model is not "
                f"supported; kumi knows {', '.join(known)}"
            )
        return str(said) if said in known else known[0]

    def _split(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `config` says of the text, in a table of its own or, as older ones do, beside the rest; and the rest."""
        outer = {key: value for key, value in config.items() if key in self.kept}
        flat = {key: value for key, value in config.items() if key not in (*self.kept, "text_config")}
        inner = dict(config.get("text_config") or {})
        said = [
            one
            for one in (flat.pop("tie_word_embeddings", None), inner.pop("tie_word_embeddings", None))
            if one is not None
        ]
        tied = {"tie_word_embeddings": any(said) if self.either_ties else said[0]} if said else {}
        for key in set(flat) & set(inner) - {*SHARED, *UNREAD}:
            if flat[key] != inner[key]:
                raise ModelError(
                    f"config.json: {key}={flat[key]!r} differs from {inner[key]!r} in text_config; remove one of them"
                )
        text = {**flat, **{key: value for key, value in inner.items() if key not in self.kept}}
        if "vision_config" not in outer:
            raise ModelError(f"config.json: 'vision_config' is missing; a {self.family} model has one")
        return text | tied, outer

    def _note(self) -> str:
        names = ", ".join(f"{beginning}*" for beginning in self.beginnings)
        return f"{names} are carried along as they are: not computed, not trained, not counted"
