"""The cache of generation: the tensors that each layer has for a sequence, with their shapes.

    Attention        keys and values (tokens, key-value heads, head size); a sliding window needs only its latest
                     positions
    LatentAttention  the latent vector and the rotated key that all heads share (tokens, kv_lora_rank +
                     qk_rope_head_dim), as in DeepSeek-V2 (DeepSeek-AI, 2024, arXiv:2405.04434, section 2.1)
    Mamba            the inputs of its convolutions at the latest positions, and the state of each head: a fixed size
    none             nothing

Keys are rotated before they are stored. Tensor parallelism shards key-value heads and groups of heads as it shards
their weights; a latent vector is on every rank. Data-parallel ranks have the caches of their own sequences. Experts
have no cache. Both plans and the engine that generates read the shapes from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from kumi.spec.ledger import LAYERS
from kumi.spec.model import Attention, LatentAttention, Mamba, ModelSpec
from kumi.spec.op import Dim
from kumi.spec.precision import ITEMSIZE
from kumi.spec.sharding import DIM_TO_AXIS, shard_size


@dataclass(frozen=True)
class CacheTensor:
    """A tensor that a layer keeps for one sequence.

    - `name`: "key", "value", "latent", "x_conv", "b_conv", "c_conv" or "ssm".
    - `dims`: the dims of one position, or of the whole tensor if it does not grow.
    - `grows`: the tensor has a leading dimension of positions.
    - `window`: the number of latest positions that it has at most; None for all.
    - `wide`: its dtype is float32 (float64 for a float64 model), because it accumulates over positions; else it is the
      compute dtype.
    """

    name: str
    dims: tuple[Dim, ...]
    grows: bool = True
    window: int | None = None
    wide: bool = False

    def positions(self, length: int) -> int:
        """Return how many positions of a sequence of `length` tokens the tensor has; 1 if it does not grow."""
        if not self.grows:
            return 1
        return length if self.window is None else min(length, self.window)

    def can_shorten(self, length: int, to: int) -> bool:
        """Return True if generation can go on after a cut of the sequence from `length` to `to` tokens.

        The tensor must have all that the token at position `to` needs.
        """
        if not self.grows:
            return to == length
        # The tensor has the positions from length - window on, and the token sees those from to - window + 1 on.
        return self.window is None or length <= self.window or to >= length - 1

    def local_dims(self, tp: int = 1) -> tuple[int, ...]:
        """Return the sizes of `dims` on a tp rank."""
        return tuple(shard_size(dim, tp if DIM_TO_AXIS.get(dim.name) == "tp" else 1) for dim in self.dims)

    def shape(self, length: int, tp: int = 1) -> tuple[int, ...]:
        """Return the shape for a sequence of `length` tokens on a tp rank; a batch has one more dimension in front."""
        dims = self.local_dims(tp)
        return (self.positions(length), *dims) if self.grows else dims

    def dtype(self, compute: str) -> str:
        """Return the dtype in a model that computes in `compute`."""
        return "float32" if self.wide and compute != "float64" else compute

    def nbytes(self, length: int, compute: str, tp: int = 1) -> int:
        """Return the bytes for a sequence of `length` tokens on a tp rank, in a model that computes in `compute`."""
        return self.positions(length) * prod(self.local_dims(tp)) * ITEMSIZE[self.dtype(compute)]


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer.

    - `name`: the module of the mixer ("model.layers.3.self_attn"); empty for a layer without a mixer.
    - `tensors`: empty for a layer without a mixer.
    """

    name: str
    tensors: tuple[CacheTensor, ...]

    def nbytes(self, length: int, compute: str, tp: int = 1) -> int:
        """Return the bytes for a sequence of `length` tokens on a tp rank, in a model that computes in `compute`."""
        return sum(tensor.nbytes(length, compute, tp) for tensor in self.tensors)


def _attention_tensors(att: Attention) -> tuple[CacheTensor, ...]:
    dims = (Dim("kv_heads", att.num_key_value_heads), Dim("head_dim", att.head_dim))
    return tuple(CacheTensor(name, dims, window=att.sliding_window) for name in ("key", "value"))


def _latent_tensors(att: LatentAttention) -> tuple[CacheTensor, ...]:
    return (CacheTensor("latent", (Dim("kv_latent", att.kv_lora_rank + att.qk_rope_head_dim),)),)


def _mamba_tensors(mamba: Mamba) -> tuple[CacheTensor, ...]:
    """Return the latest inputs of the convolutions of x, b and c (see `kumi.spec.mamba_ops`), and the heads' states."""
    groups, kernel = mamba.n_groups, Dim("kernel", mamba.conv_kernel - 1)
    channels = Dim("groups", mamba.width, mamba.width // groups)
    shared = Dim("groups", groups * mamba.state_size, mamba.state_size)
    inputs = (("x_conv", channels), ("b_conv", shared), ("c_conv", shared))
    heads = Dim("groups", mamba.num_heads, mamba.num_heads // groups)
    state = (heads, Dim("head_dim", mamba.head_dim), Dim("state", mamba.state_size))
    convolutions = (CacheTensor(name, (kernel, dim), grows=False) for name, dim in inputs)
    return (*convolutions, CacheTensor("ssm", state, grows=False, wide=True))


# Class of `LayerSpec.attention` -> a function of the attention or mixer that returns the tensors of its cache.
CACHE_TENSORS: dict[type, Callable[[Any], tuple[CacheTensor, ...]]] = {
    Attention: _attention_tensors,
    LatentAttention: _latent_tensors,
    Mamba: _mamba_tensors,
}


@lru_cache(maxsize=64)
def cache_layers(model: ModelSpec) -> tuple[LayerCache, ...]:
    """Return the cache of each layer of `model`, in order."""
    return tuple(
        LayerCache("", ())
        if layer.attention is None
        else LayerCache(
            f"{LAYERS}{index}.{layer.attention.module_name}", CACHE_TENSORS[type(layer.attention)](layer.attention)
        )
        for index, layer in enumerate(model.layers)
    )


def cache_bytes(model: ModelSpec, batch: int, context: int, dtype: str, tp: int = 1) -> int:
    """Return the bytes of the cache on a tp rank for `batch` sequences of `context` tokens each, in `dtype`."""
    return batch * sum(layer.nbytes(context, dtype, tp) for layer in cache_layers(model))


def sequences_that_fit(model: ModelSpec, memory: int, context: int, dtype: str, tp: int = 1) -> int:
    """Return the largest number of sequences of `context` tokens whose cache fits in `memory` bytes of a tp rank."""
    return max(0, memory // max(1, cache_bytes(model, 1, context, dtype, tp)))


def context_that_fits(model: ModelSpec, memory: int, batch: int, dtype: str, tp: int = 1) -> int:
    """Return the largest number of tokens of each of `batch` sequences whose cache fits in `memory` bytes of a tp rank.

    It is at most the positions of the model, and 0 if the cache of a single token does not fit.
    """
    low, high = 0, model.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        if cache_bytes(model, batch, middle, dtype, tp) <= memory:
            low = middle
        else:
            high = middle - 1
    return low
