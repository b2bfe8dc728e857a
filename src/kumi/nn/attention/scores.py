"""The transformations of attention scores between the product of queries with keys and the softmax."""

from __future__ import annotations

from functools import lru_cache
from math import floor, log2
from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """How the product of a query with a key becomes a score, before the mask and the softmax.

    `scale`: factor of the product; None for 1 / sqrt(E) with heads of E dims.
    `softcap`: score = softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118).
    `slopes`: ALiBi. Subtracts slope * distance, with one slope per local query head (Press et al., 2021,
    arXiv:2108.12409).
    `bf16_bias`: adds slope * key position instead, with slope and product rounded to bfloat16, times the scale.
    transformers computes this for Falcon; from position 256 on, the bias is a staircase.

    Attention sinks are scores already: none of these settings changes them.
    """

    scale: float | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    bf16_bias: bool = False

    @property
    def fused(self) -> bool:
        """True if PyTorch's fused kernels can compute these scores."""
        return self.softcap is None and self.slopes is None

    def factor(self, size: int) -> float:
        """Return the scale of the scores of heads of `size` dims."""
        return size**-0.5 if self.scale is None else self.scale

    def key_factor(self, size: int) -> float:
        """Return the factor to multiply keys of `size` dims by before the product, as `apply_softcap` expects."""
        return self.factor(size) / (1.0 if self.softcap is None else self.softcap)

    def apply_softcap(self, products: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores and the tanh that `softcap_backward` needs (None without softcap).

        `products` are those of queries with keys that were multiplied by `key_factor`; their memory is reused.
        """
        if self.softcap is None:
            return products, None
        tanh = products.tanh_()
        return tanh * self.softcap, tanh

    def alibi_bias(self, like: Tensor, kv_heads: int, size: int) -> AlibiBias | None:
        """Return the ALiBi bias of scores of heads of `size` dims, or None without slopes.

        It has the dtype and the device of `like`.
        """
        if self.slopes is None:
            return None
        dtype = torch.bfloat16 if self.bf16_bias else like.dtype
        slopes = torch.tensor(self.slopes, dtype=dtype, device=like.device).view(kv_heads, -1, 1)
        return AlibiBias(slopes, self.factor(size) if self.bf16_bias else None, like.dtype)

    def part(self, index: int, parts: int) -> Scores:
        """Return the scores of the heads in part `index`, if all heads are split into `parts` parts of the same
        size."""
        if self.slopes is None or parts == 1:
            return self
        heads = len(self.slopes) // parts
        return self._replace(slopes=self.slopes[index * heads : (index + 1) * heads])


class AlibiBias(NamedTuple):
    """The ALiBi bias of local heads.

    `slopes`: (K, G, 1), one for each query head.
    `step_factor`: the score scale, which multiplies a bias rounded to bfloat16; None for a bias that is not rounded.
    `dtype`: of the scores.
    """

    slopes: Tensor
    step_factor: float | None
    dtype: torch.dtype

    @property
    def bf16_bias(self) -> bool:
        """True if the bias is rounded to bfloat16."""
        return self.step_factor is not None

    def key_bias(self, positions: Tensor, origin: int) -> Tensor:
        """Return the bias (K, G, M) of keys at `positions` (M,), as if every query were at position `origin`.

        Positions count from the beginning of the row, or of the key's document if the bias is rounded.
        """
        if self.step_factor is None:
            return self.slopes * (positions - origin)
        return (self.slopes * positions).to(self.dtype) * self.step_factor

    def query_excess(self, count: int) -> Tensor | None:
        """Return the excess (K, G, N) of `key_bias` for `count` queries that begin at the origin; None if the bias is
        rounded.

        The excess is the same for all keys of a query, so only the log-sum-exp has to be corrected by it.
        """
        if self.bf16_bias:
            return None
        return self.slopes * torch.arange(count, device=self.slopes.device)


PLAIN_SCORES = Scores()
# The fields of `Scores` in the schema of an operator; `stepped` is `bf16_bias`.
SCORES_SCHEMA = "float? scale=None, float? softcap=None, float[]? slopes=None, bool stepped=False"


def softcap_backward(grad: Tensor, tanh: Tensor | None) -> Tensor:
    """Return the gradient of the uncapped scores, given `grad` of the capped ones; `grad` may be overwritten."""
    return grad if tanh is None else grad.mul_((1.0 - tanh.square()).to(grad.dtype))


@lru_cache(maxsize=64)
def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the ALiBi slope of each of `heads` heads.

    If their number n is a power of two, the slopes are 2^(-8/n), 2^(-16/n), and so on. Otherwise they are those of the
    power of two below n, followed by every other slope of the power above, as in published models.
    """
    below = 2 ** floor(log2(heads))
    slopes = [2.0 ** (-8.0 * index / below) for index in range(1, below + 1)]
    between = [2.0 ** (-4.0 * index / below) for index in range(1, 2 * (heads - below) + 1, 2)]
    return tuple(slopes + between)
