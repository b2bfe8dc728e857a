"""Modules that are trained in full beside adapters, in PEFT's format: whole tensors under the names of transformers.

    adapter_config.json          "modules_to_save": ["model.embed_tokens", "lm_head"]
    adapter_model.safetensors    base_model.model.lm_head.weight (V, D)

PEFT gives the token table and the head a tensor each, even if the model ties them. kumi writes both, with equal values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from kumi.spec.adapters import is_adapter
from kumi.spec.ledger import EMBEDDING, HEADS, trained_names
from kumi.spec.model import ModelSpec
from kumi.spec.peft import module_name
from kumi.spec.weights import stored_tensors


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of a file that holds the whole native tensor `native`; `shape` is that in the file."""

    native: str
    shape: tuple[int, ...]


@lru_cache(maxsize=8)
def whole_tensors(spec: ModelSpec) -> Mapping[str, WholeTensor]:
    """Return the tensors of a model of `spec` that hold one native tensor, by name in a loaded transformers model."""
    base = replace(spec, lora=None)
    result = {
        loaded_name(spec, name): WholeTensor(pieces[0].param.name, pieces[0].part.shape)
        for name, pieces in stored_tensors(base).items()
        if pieces[0].part.is_whole
    }
    if spec.tie_word_embeddings:
        table = next(tensor for tensor in result.values() if tensor.native == EMBEDDING)
        result[HEADS["lm"]] = table
    return result


def full_tensors(spec: ModelSpec) -> dict[str, WholeTensor]:
    """Return the tensors of the modules that the adapters of `spec` train in full, by their name in transformers."""
    trained = {name for name in trained_names(spec) if not is_adapter(name)}
    return {name: tensor for name, tensor in whole_tensors(spec).items() if tensor.native in trained}


def target_names(spec: ModelSpec) -> list[str]:
    """Return PEFT's modules_to_save: the full names of the modules that are trained in full."""
    return sorted({name.rpartition(".")[0] for name in full_tensors(spec)})


def loaded_name(spec: ModelSpec, stored: str) -> str:
    """Return the name that a loaded transformers model gives the tensor that files call `stored`."""
    module = module_name(spec, stored)
    return f"{module}.weight" if stored.endswith(".weight") else module
