"""What becomes of attention's scores between the product of queries with keys and the softmax."""

from __future__ import annotations

from functools import lru_cache
from math import floor, log2
from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """How the product of a query with a key becomes a score.

    It is multiplied by `scale` (None: 1 / sqrt(E) for heads of E dims); with a `softcap` becomes softcap * tanh(score /
    softcap) (Gemma 2, arXiv:2408.00118); and with `slopes`, one for every query head at hand, loses slope * distance
    (Press et al., 2021, arXiv:2108.12409). The mask comes after all of these, and sinks are no product: what one sees
    of nothing is its head's sink, as it is.

    `stepped`: in place of that, scores gain slope * position of the key in its document, rounded to bfloat16 at every
    step and multiplied by the scale like products: what transformers computes for Falcon, a staircase from 256 on.
    """

    scale: float | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    stepped: bool = False

    @property
    def fused(self) -> bool:
        """Whether PyTorch's kernels compute scores like these."""
        return self.softcap is None and self.slopes is None

    def factor(self, size: int) -> float:
        """What products of heads of `size` dims are multiplied by."""
        return size**-0.5 if self.scale is None else self.scale

    def key_factor(self, size: int) -> float:
        """What keys of `size` dims are multiplied by so that products come as `capped` wants them."""
        return self.factor(size) / (1.0 if self.softcap is None else self.softcap)

    def capped(self, products: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores, given `products` of queries with keys multiplied by `key_factor`, whose memory is used again; and
        with a softcap the hyperbolic tangents, which `uncapped` takes."""
        if self.softcap is None:
            return products, None
        tangents = products.tanh_()
        return tangents * self.softcap, tangents

    def tilt(self, like: Tensor, kv_heads: int, size: int) -> Tilt | None:
        """What `slopes` add to scores of heads of `size` dims, in dtype and on the device of `like`."""
        if self.slopes is None:
            return None
        dtype = torch.bfloat16 if self.stepped else like.dtype
        slopes = torch.tensor(self.slopes, dtype=dtype, device=like.device).view(kv_heads, -1, 1)
        return Tilt(slopes, self.factor(size) if self.stepped else None, like.dtype)

    def part(self, index: int, parts: int) -> Scores:
        """The same for the heads of a rank, the `index`-th of as many equal parts of all heads as there are `parts`."""
        if self.slopes is None or parts == 1:
            return self
        count = len(self.slopes) // parts
        return self._replace(slopes=self.slopes[index * count : (index + 1) * count])


class Tilt(NamedTuple):
    """`slopes` (K, G, 1) of the query heads of each key head, and with steps what these are multiplied by."""

    slopes: Tensor
    step_factor: float | None
    dtype: torch.dtype

    @property
    def stepped(self) -> bool:
        return self.step_factor is not None

    def of_keys(self, places: Tensor, origin: int) -> Tensor:
        """What is added to the scores of keys at `places` (M,), (K, G, M): for all queries alike, as if all were at
        `origin`. `places` count from the beginning of the row, with steps from that of the key's document."""
        if self.step_factor is None:
            return self.slopes * (places - origin)
        return (self.slopes * places).to(self.dtype) * self.step_factor

    def of_queries(self, count: int) -> Tensor | None:
        """By how much (K, G, N) `of_keys` is too large for each of the `count` queries from the origin on."""
        if self.stepped:
            return None
        return self.slopes * torch.arange(count, device=self.slopes.device)


PLAIN = Scores()
# The same, as operators take it.
SCHEMA = "float? scale=None, float? softcap=None, float[]? slopes=None, bool stepped=False"


def uncapped(grad: Tensor, tangents: Tensor | None) -> Tensor:
    """The gradient of products, as if no factor were there, given that of capped scores, whose memory may be used."""
    return grad if tangents is None else grad.mul_((1.0 - tangents.square()).to(grad.dtype))


@lru_cache(maxsize=64)
def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each of `heads` heads: with n heads, a power of two, 2^(-8/n), 2^(-16/n) and so on; if n is none,
    those of the power below and then every other one of the power above, as published models have them."""
    below = 2 ** floor(log2(heads))
    found = [2.0 ** (-8.0 * index / below) for index in range(1, below + 1)]
    between = [2.0 ** (-4.0 * index / below) for index in range(1, 2 * (heads - below) + 1, 2)]
    return tuple(found + between)
