"""The quantization_config of config.json: the storage format of the weights, not the model's computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import brief

_KEY = "quantization_config"
# The methods that kumi.convert.hf.dequantize reads.
READABLE_METHODS = ("fp8", "mxfp4")


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization_config of `config`, None for unquantized weights; raise ModelError unless it is a table.

    Methods that kumi cannot read are refused later, by the reader of the weights.
    """
    table = config.get(_KEY)
    if table is not None and not isinstance(table, dict):
        raise ModelError(f"config.json: {_KEY}={brief(table)} must be a table (a JSON object); correct or remove it")
    return table


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` without its quantization_config: the same model with unquantized weights."""
    return {key: value for key, value in config.items() if key != _KEY}


def quantization_note(method: Mapping[str, Any]) -> str:
    """Return a note for the user about weights quantized by `method` (a quantization_config)."""
    name = brief(method.get("quant_method"))
    if method.get("quant_method") not in READABLE_METHODS:
        return f"the weights are quantized by {name}, which kumi cannot read: it can plan this model but not load it"
    return f"the weights are quantized by {name}; kumi reads and writes them as bfloat16"
