"""What config.json says of how the weights are stored, which says nothing of what the model computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import brief

KEY = "quantization_config"
# The methods that kumi.convert.hf.dequantize reads.
READABLE = ("fp8", "mxfp4")


def method(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how the weights that go with `config` are quantised, None where they are not.

    Raise ModelError where that is no table. Who reads the weights refuses ways that kumi cannot read.
    """
    found = config.get(KEY)
    if found is not None and not isinstance(found, dict):
        raise ModelError(f"config.json: {KEY} is {brief(found)}, no object; remove it")
    return found


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` as it is of the same model with weights that are not quantised."""
    return {key: value for key, value in config.items() if key != KEY}


def note(how: Mapping[str, Any]) -> str:
    """Return a sentence for the user of a model whose weights are quantised as `how` says."""
    name = brief(how.get("quant_method"))
    if how.get("quant_method") not in READABLE:
        return f"the weights are quantised ({name}), which kumi cannot read: it plans the model, and does not load it"
    return f"the weights are quantised ({name}); they are read, and written, as bfloat16"
