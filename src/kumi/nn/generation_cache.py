"""The caches of all layers of a decoder, for generation, and the contexts through which its layers use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kumi.nn.attention.attention_context import AttentionContext, document_lengths
from kumi.nn.attention.cached_attention import AttentionCache, ExtendStep, LatentCache, PromptStep, Step, TokenStep
from kumi.nn.mamba_cache import MambaCache
from kumi.nn.mamba_scan import ScanInputs
from kumi.spec import model
from kumi.spec.cache_state import CacheTensor, cache_layers
from kumi.spec.model import ModelSpec

MixerCache = AttentionCache | LatentCache | MambaCache


class GenerationCache:
    """The cache of every layer of `spec`, for `slots` sequences of at most `capacity` tokens.

    `tp`: number of tensor-parallel ranks that split the heads; this is the cache of one of them.

    Its tensors are those of `kumi.spec.cache_state`, in `dtype`; those that it calls wide are in float32 or wider.
    """

    def __init__(
        self, spec: ModelSpec, slots: int, capacity: int, *, dtype: torch.dtype, device: torch.device, tp: int = 1
    ) -> None:
        self.spec, self.slots, self.capacity, self.tp = spec, slots, capacity, tp
        self.dtype, self.device = dtype, device
        self.layers: list[MixerCache | None] = []
        for layer, tensors in zip(spec.layers, self._allocate(capacity), strict=True):
            build = None if layer.attention is None else _CACHES[type(layer.attention)]
            self.layers.append(None if build is None else build(tensors))

    def _allocate(self, capacity: int) -> Iterator[list[Tensor]]:
        """Yield the tensors of each layer, zeros for `capacity` positions."""
        name = str(self.dtype).removeprefix("torch.")

        def allocate(tensor: CacheTensor) -> Tensor:
            shape = tensor.shape(capacity, self.tp)
            if tensor.grows and len(shape) == 3:  # heads before positions, as the products of attention need them
                shape = (shape[1], shape[0], shape[2])
            return torch.zeros(self.slots, *shape, dtype=getattr(torch, tensor.dtype(name)), device=self.device)

        for state in cache_layers(self.spec):
            yield [allocate(tensor) for tensor in state.tensors]

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions, layer by layer. No sequence may be longer than the old capacity."""
        if capacity <= self.capacity:
            return
        for cache, tensors in zip(self.layers, self._allocate(capacity), strict=True):
            for tensor, larger in zip(() if cache is None else cache.tensors, tensors, strict=True):
                # Within the old capacity, no sequence has overwritten tokens that left its sliding window yet, so all
                # tokens keep their places.
                larger[tuple(map(slice, tensor.shape))] = tensor
            if cache is not None and not isinstance(cache, MambaCache):
                cache.tensors = tuple(tensors)
        self.capacity = capacity

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for cache in self.layers if cache is not None for tensor in cache.tensors)

    def copy(self, source: int, target: int) -> None:
        """Copy what all layers have of the sequence in slot `source` to slot `target`."""
        for cache in self.layers:
            if cache is not None:
                cache.copy(source, target)


@dataclass(frozen=True)
class CachedTokens:
    """The tokens of one forward pass and the cache that they extend: a `kumi.nn.decoder.CachedPass`."""

    cache: GenerationCache
    step: Step

    def lengths(self, tokens: Tensor, document_ids: Tensor | None) -> int | Tensor:
        if isinstance(self.step, TokenStep):
            return self.step.lengths[:, None] + 1
        if isinstance(self.step, ExtendStep):
            return self.step.stop
        return document_lengths(tokens, document_ids)

    def contexts(self, context: AttentionContext) -> list[AttentionContext]:
        return [self._context(cache, context) for cache in self.cache.layers]

    def _context(self, cache: MixerCache | None, context: AttentionContext) -> AttentionContext:
        if isinstance(cache, AttentionCache):
            return replace(context, attend=partial(cache.attend, self.step, context.attend))
        if isinstance(cache, LatentCache):
            return replace(context, latents=_BoundLatents(cache, self.step))
        if isinstance(cache, MambaCache):
            return replace(context, recurrence=_BoundRecurrence(cache, self.step))
        return context


@dataclass(frozen=True)
class _BoundLatents:
    """A latent cache during one step: a `kumi.nn.attention.attention_context.LatentMemory`."""

    cache: LatentCache
    step: Step

    @property
    def attends(self) -> bool:
        return not isinstance(self.step, PromptStep)

    def store(self, latents: Tensor, keys: Tensor) -> None:
        self.cache.store(self.step, latents, keys)

    def attend(self, q: Tensor, up: Callable[[], Tensor], nope_size: int) -> Tensor:
        assert not isinstance(self.step, PromptStep), "whole prompts attend to their own tokens"
        return self.cache.attend(self.step, q, up, nope_size)


@dataclass(frozen=True)
class _BoundRecurrence:
    """A Mamba cache during one step: a `kumi.nn.attention.attention_context.RecurrentMemory`."""

    cache: MambaCache
    step: Step

    def convolve(self, convolutions: Sequence[Any], inputs: Sequence[Tensor], numbers: Tensor | None) -> list[Tensor]:
        return self.cache.convolve(self.step, convolutions, inputs, numbers)

    def scan(self, inputs: ScanInputs) -> Tensor:
        return self.cache.scan(self.step, inputs)


# Class of `LayerSpec.attention` -> a function of the tensors of `kumi.spec.cache_state`, in their order.
_CACHES: Mapping[type, Callable[[list[Tensor]], MixerCache]] = {
    model.Attention: lambda tensors: AttentionCache(*tensors),
    model.LatentAttention: lambda tensors: LatentCache(*tensors),
    model.Mamba: lambda tensors: MambaCache(tensors[:-1], tensors[-1]),
}
