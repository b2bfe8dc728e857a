"""The tensors of a checkpoint, whatever the layout: names and global shapes, and a digest of the model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

from kumi.spec.ledger import params, tensors, trained_names
from kumi.spec.model import ModelSpec
from kumi.spec.optim import Optim
from kumi.spec.optim_states import states_of
from kumi.spec.weight_rules import PLAIN

# Prefixes of the names of the model's tensors, and of the states of the optimizer.
MODEL_PREFIX, OPTIM_PREFIX = "model/", "optim/"
# Prefix of the names of all tensors of a critic, before `MODEL_PREFIX` or `OPTIM_PREFIX`.
CRITIC_PREFIX = "critic/"


def model_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the global shape, by name, of every tensor of the model; only trained ones if it has adapters."""
    trained = trained_names(spec)
    saved = [tensor for tensor in tensors(spec) if spec.lora is None or tensor.name in trained]
    return {MODEL_PREFIX + tensor.name: tensor.shape for tensor in saved}


def optimizer_shapes(spec: ModelSpec, optim: Optim) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every state that `optim` keeps, by name."""
    trained = (param for param in params(spec) if not param.frozen)
    return {
        f"{OPTIM_PREFIX}{param.name}/{state.name}": state.shape
        for param in trained
        for state in states_of(optim, param)
    }


def run_shapes(spec: ModelSpec, optim: Optim, critic: ModelSpec | None = None) -> dict[str, tuple[int, ...]]:
    """Return the global shape, by name, of every tensor in the checkpoint of a run that trains the model `spec`, and a
    `critic` with the same kind of optimizer."""
    of_critic = {} if critic is None else run_shapes(critic, optim)
    own = model_shapes(spec) | optimizer_shapes(spec, optim)
    return own | {CRITIC_PREFIX + name: shape for name, shape in of_critic.items()}


def model_digest(spec: ModelSpec) -> str:
    """Return the BLAKE2b digest (32 hexadecimal digits) of `spec`, without its adapters and its format in files.

    Fields at their defaults are left out. A field that a later version adds therefore leaves the digest unchanged for
    models that do not use it.
    """
    plain = _plain(replace(spec, lora=None, weights=PLAIN))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Return `value` as JSON: a dataclass as an object of its class and the fields that are not at their defaults."""
    if is_dataclass(value):
        compared = {field.name: getattr(value, field.name) for field in fields(value) if field.compare}
        defaults = {field.name: field.default for field in fields(value)}
        changed = {name: _plain(item) for name, item in compared.items() if item != defaults[name]}
        return {"class": type(value).__name__, **changed}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {str(key): _plain(item) for key, item in value.items()} if isinstance(value, dict) else value
