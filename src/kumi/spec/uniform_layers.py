"""What the layers of a model have in common: most trainers describe a model by a few numbers, not layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, ModelSpec, MoE


@dataclass(frozen=True)
class Alike:
    """A model whose layers differ at most in their windows and in which of them are mixtures of experts.

    `layer` is the first one, its window left out; `dense` and `moe` are None where no layer has one. `windows` and
    `experts` say of every layer how far it sees (None: all the way) and whether it has experts.
    """

    layer: LayerSpec
    attention: Attention | LatentAttention
    dense: MLP | None
    moe: MoE | None
    windows: tuple[int | None, ...]
    experts: tuple[bool, ...]

    @property
    def window(self) -> int | None:
        """The window of the layers that have one, which is the same for all of them."""
        return next((window for window in self.windows if window is not None), None)


@lru_cache(maxsize=64)
def alike(model: ModelSpec) -> Alike | None:
    """What the layers of `model` have in common; None where they differ in more than `Alike` can say, or one of them is
    not attention with an mlp."""
    kinds, of_layer = model.layer_kinds()
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
    return Alike(layer, attention, next(iter(dense), None), next(iter(moe), None), windows, experts)


def _attention(layer: LayerSpec) -> Attention | LatentAttention:
    attention = layer.attends
    assert attention is not None, "alike() asks for attention in every layer"
    return attention if isinstance(attention, LatentAttention) else replace(attention, sliding_window=None)


def uncommon(model: ModelSpec, found: Alike) -> dict[str, bool]:
    """Traits that Llama's layers lack in every trainer, and whether the model has them."""
    attention, moe, rope = found.attention, found.moe, found.attention.rope
    grouped = isinstance(attention, Attention)
    return {
        "scores scaled otherwise, capped or biased by distance": grouped
        and (attention.score_scale is not None or attention.softcap is not None or attention.alibi),
        "neighbouring dimensions that are turned together": rope is not None and rope.interleave,
        "queries that grow with their position": rope is not None and rope.query_growth != 0,
        "layers that normalise only what they add": not found.layer.pre_norms,
        "norms that multiply by 1 + weight": model.zero_centered_norm,
        "scaled embeddings, layers or logits": (model.embedding_scale, model.residual_scale, model.logit_scale)
        != (1.0, 1.0, 1.0),
        "capped logits": model.logit_softcap is not None,
        "learned positions": model.learned_positions > 0,
        "ungated or clamped experts": moe is not None and (not moe.gated or moe.act_limit is not None),
    }


def runs(flags: Sequence[object]) -> str:
    """`flags` as a Python expression of repeated lists, such as ([1]*5+[0])*4, the shortest that repeats one block."""
    for size in range(1, len(flags) + 1):
        if len(flags) % size == 0 and list(flags[:size]) * (len(flags) // size) == list(flags):
            block, times = _block(flags[:size]), len(flags) // size
            return block if times == 1 else f"({block})*{times}" if "+" in block or "*" in block else f"{block}*{times}"
    return "[]"


def _block(flags: Sequence[object]) -> str:
    """`flags` as a sum of repeated one-element lists."""
    parts: list[tuple[object, int]] = []
    for flag in flags:
        if parts and parts[-1][0] == flag:
            parts[-1] = (flag, parts[-1][1] + 1)
        else:
            parts.append((flag, 1))
    return "+".join(f"[{flag}]" if count == 1 else f"[{flag}]*{count}" for flag, count in parts)
