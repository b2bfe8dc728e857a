"""The common properties of a model's layers, for trainers that describe a model by a few numbers for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, ModelSpec, MoE


@dataclass(frozen=True)
class UniformLayers:
    """The layers of a model, which differ at most in their windows and in having a dense MLP or experts.

    - `layer`, `attention`: of the first layer, without its window.
    - `dense`, `moe`: the dense MLP and the experts; None if no layer has them.
    - `windows`: the sliding window of each layer; None for full attention.
    - `experts`: True for each layer with experts.
    """

    layer: LayerSpec
    attention: Attention | LatentAttention
    dense: MLP | None
    moe: MoE | None
    windows: tuple[int | None, ...]
    experts: tuple[bool, ...]

    @property
    def window(self) -> int | None:
        """The window of all layers with a sliding window, or None."""
        return next((window for window in self.windows if window is not None), None)


@lru_cache(maxsize=64)
def uniform_layers(model: ModelSpec) -> UniformLayers | None:
    """Return the common properties of the layers of `model`.

    None if they differ in more than `UniformLayers` can express, or if a layer is not attention with an mlp.
    """
    kinds, of_layer = model.unique_layers()
    if any(layer.attends is None or layer.mlp is None for layer in kinds):
        return None
    attentions = {_attention(layer) for layer in kinds}
    shapes = {(layer.parallel, layer.shared_norm, layer.post_norms) for layer in kinds}
    dense = {layer.mlp for layer in kinds if isinstance(layer.mlp, MLP)}
    moe = {layer.mlp for layer in kinds if isinstance(layer.mlp, MoE)}
    windows = tuple(kinds[index].window for index in of_layer)
    if max(len(attentions), len(shapes), len(dense), len(moe), len(set(windows) - {None})) > 1:
        return None
    experts = tuple(isinstance(kinds[index].mlp, MoE) for index in of_layer)
    attention = _attention(kinds[0])
    layer = replace(kinds[0], attention=attention)
    return UniformLayers(layer, attention, next(iter(dense), None), next(iter(moe), None), windows, experts)


def _attention(layer: LayerSpec) -> Attention | LatentAttention:
    """Return the attention of `layer` without its window."""
    attention = layer.attends
    assert attention is not None, "uniform_layers() requires attention in each layer"
    return attention if isinstance(attention, LatentAttention) else replace(attention, sliding_window=None)


def traits_beyond_llama(model: ModelSpec, uniform: UniformLayers) -> dict[str, bool]:
    """Return, for each trait that the Llama layers of other trainers lack, whether `model` has it."""
    attention, moe, rope = uniform.attention, uniform.moe, uniform.attention.rope
    grouped = isinstance(attention, Attention)
    return {
        "scores with another scale, a soft cap or a bias by distance": grouped
        and (attention.score_scale is not None or attention.softcap is not None or attention.alibi),
        "RoPE of adjacent dimensions": rope is not None and rope.interleave,
        "queries scaled by their position": rope is not None and rope.query_growth != 0,
        "layers that normalize only their outputs": not uniform.layer.pre_norms,
        "norms that multiply by 1 + weight": model.zero_centered_norm,
        "scaled embeddings, layers or logits": (model.embedding_scale, model.residual_scale, model.logit_scale)
        != (1.0, 1.0, 1.0),
        "capped logits": model.logit_softcap is not None,
        "learned positions": model.learned_positions > 0,
        "ungated or clamped experts": moe is not None and (not moe.gated or moe.act_limit is not None),
    }


def as_repeated_lists(flags: Sequence[object]) -> str:
    """Return `flags` as a Python expression, such as ([1]*5+[0])*4, that repeats the shortest possible block."""
    for size in range(1, len(flags) + 1):
        if len(flags) % size == 0 and list(flags[:size]) * (len(flags) // size) == list(flags):
            block, times = _block(flags[:size]), len(flags) // size
            return block if times == 1 else f"({block})*{times}" if "+" in block or "*" in block else f"{block}*{times}"
    return "[]"


def _block(flags: Sequence[object]) -> str:
    """Return `flags` as a sum of repeated one-element lists."""
    parts: list[tuple[object, int]] = []
    for flag in flags:
        if parts and parts[-1][0] == flag:
            parts[-1] = (flag, parts[-1][1] + 1)
        else:
            parts.append((flag, 1))
    return "+".join(f"[{flag}]" if count == 1 else f"[{flag}]*{count}" for flag, count in parts)
