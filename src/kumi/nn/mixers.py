"""The token mixers, by the class of their spec.

To add a mixer: give its spec a `module_name`, list its operations in `kumi.spec.attention_ops.MIXER_OPS`, and list its
module in `MIXERS`. The module is called with hidden states and an `AttentionContext`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from kumi.nn.attention.grouped_query import Attention
from kumi.nn.attention.mla import LatentAttention
from kumi.nn.mamba import Mamba
from kumi.spec import model
from kumi.spec.model import ModelSpec


def _attention(model_spec: ModelSpec, spec: model.Attention, **options: Any) -> Attention:
    centered = model_spec.zero_centered_norm
    return Attention(model_spec.hidden_size, spec, model_spec.norm_eps, zero_centered=centered, **options)


def _latent(model_spec: ModelSpec, spec: model.LatentAttention, **options: Any) -> LatentAttention:
    return LatentAttention(model_spec.hidden_size, spec, **options)


def _mamba(model_spec: ModelSpec, spec: model.Mamba, **options: Any) -> Mamba:
    return Mamba(model_spec.hidden_size, spec, model_spec.norm_eps, **options)


# Class of `LayerSpec.attention` -> a function of (model spec, mixer spec, device, dtype) that returns the module.
MIXERS: dict[type, Callable[..., nn.Module]] = {
    model.Attention: _attention,
    model.LatentAttention: _latent,
    model.Mamba: _mamba,
}
