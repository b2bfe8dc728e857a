"""The modules that mix tokens, each by the class of its spec.

To add one, give its spec a `module_name`, its operations a line in `kumi.spec.attention_ops.MIXER_OPS`, and its module
a line in `MIXERS`: a function of (hidden states, `Where`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from kumi.nn.attention import Attention
from kumi.nn.latent import LatentAttention
from kumi.nn.mamba import Mamba
from kumi.spec import model
from kumi.spec.model import ModelSpec


def _attention(of: ModelSpec, spec: model.Attention, **options: Any) -> Attention:
    return Attention(of.hidden_size, spec, of.norm_eps, zero_centered=of.zero_centered_norm, **options)


def _latent(of: ModelSpec, spec: model.LatentAttention, **options: Any) -> LatentAttention:
    return LatentAttention(of.hidden_size, spec, **options)


def _mamba(of: ModelSpec, spec: model.Mamba, **options: Any) -> Mamba:
    return Mamba(of.hidden_size, spec, of.norm_eps, **options)


# Class of `LayerSpec.attention` -> what makes its module in a model, on a device and in a dtype.
MIXERS: dict[type, Callable[..., nn.Module]] = {
    model.Attention: _attention,
    model.LatentAttention: _latent,
    model.Mamba: _mamba,
}
