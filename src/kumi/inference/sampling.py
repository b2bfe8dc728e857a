"""Choosing the next token: temperature, top-k, top-p and min-p, from logits that may be sharded over the vocabulary.

The filters apply in the order of transformers: temperature, top-k, top-p (Holtzman et al., 2020, arXiv:1904.09751),
min-p (Nguyen et al., 2024, arXiv:2407.01082). Then the token with the largest logit plus Gumbel noise is drawn, which
is a draw from the filtered distribution. Ranks with slices of the vocabulary exchange a few numbers per row: the
log-sum-exp, their best candidates, and the best token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kumi.errors import ConfigError
from kumi.inference.noise import log_exponentials
from kumi.nn.dtypes import wide
from kumi.nn.logit_chunks import FULL_VOCABULARY, Vocabulary

# The search for the nucleus of top-p begins with this many of the most probable tokens of each vocabulary slice.
_CANDIDATES = 64


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn. Raises ConfigError for values out of range.

    - `max_new_tokens`: largest number of tokens of a reply.
    - `temperature`: divisor of the logits; 0 takes the most probable token.
    - `top_k`: only the k most probable tokens; 0 for all.
    - `top_p`: only tokens for which all more probable tokens together have less than this probability.
    - `min_p`: only tokens with at least this share of the largest probability.
    - `seed`: with the prompt, the number of the sample and the position, it determines the noise.
    - `stop_ids`: tokens that end a reply and are not part of it.
    - `stop_strings`: texts that end a reply as soon as it contains one.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "0 or a positive number"),
            ("top_k", self.top_k >= 0, "a number of tokens, or 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("stop_strings", all(self.stop_strings), "texts of at least one character"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give {rule}")

    @property
    def greedy(self) -> bool:
        """True if replies do not depend on the seed."""
        return self.temperature == 0


def choose_tokens(
    logits: Tensor, keys: Sequence[int], sampling: Sampling, vocabulary: Vocabulary = FULL_VOCABULARY, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the next token (N,) of each row, and its log-probability (N,).

    The log-probability is that at the temperature, or at 1 if it is 0, before top-k, top-p and min-p.

    `logits` (N, V): of this rank's slice of the vocabulary.
    `keys`: the random key of each row (see `kumi.inference.noise.position_key`).
    `vocabulary`: this rank's slice of the vocabulary. Its `join` gathers a tensor (N, C) of all slices as (slices, N,
    C). `padding`: columns at the end of `logits` that are no tokens.
    """
    scores = logits.to(wide(logits.dtype))
    if sampling.temperature not in (0, 1):
        scores = scores / sampling.temperature
    if padding:
        scores[:, -padding:] = -torch.inf
    total = _log_sum_exp(scores, vocabulary)
    if sampling.greedy:
        return _best(scores, scores, total, vocabulary)
    allowed = filtered(scores, sampling, vocabulary)
    noise = log_exponentials(keys, vocabulary.first, scores.shape[1], device=scores.device)
    return _best(allowed - noise, scores, total, vocabulary)


def filtered(scores: Tensor, sampling: Sampling, vocabulary: Vocabulary = FULL_VOCABULARY) -> Tensor:
    """Return `scores` (N, V), logits at the temperature, with -inf for tokens that top-k, top-p and min-p exclude."""
    if sampling.top_k:
        best = _largest(scores, sampling.top_k, vocabulary)
        scores = _cut(scores, best[:, min(sampling.top_k, best.shape[1]) - 1])
    if sampling.top_p < 1:
        scores = _cut(scores, _nucleus(scores, sampling.top_p, vocabulary))
    if sampling.min_p > 0:
        largest = vocabulary.join(scores.amax(1, keepdim=True)).amax(0)
        scores = scores.masked_fill((scores - largest).exp() < sampling.min_p, -torch.inf)
    return scores


def _cut(scores: Tensor, smallest: Tensor) -> Tensor:
    """Return `scores` (N, V) with -inf where they are below `smallest` (N,)."""
    return scores.masked_fill(scores < smallest[:, None], -torch.inf)


def _largest(scores: Tensor, count: int, vocabulary: Vocabulary) -> Tensor:
    """Return the `count` largest scores over all slices, in decreasing order; all of them if there are fewer."""
    local = scores.topk(min(count, scores.shape[1]), dim=1).values
    joined = vocabulary.join(local).transpose(0, 1).flatten(1)
    return joined.sort(dim=1, descending=True).values[:, :count]


def _nucleus(scores: Tensor, top_p: float, vocabulary: Vocabulary) -> Tensor:
    """Return the smallest score (N,) that top-p keeps: more probable tokens together have less than `top_p`."""
    total, count = _log_sum_exp(scores, vocabulary), _CANDIDATES
    while True:
        candidates = _largest(scores, count, vocabulary)
        probs = (candidates - total[:, None]).exp()
        sums = probs.cumsum(1)
        # The nucleus is complete if it ends among the candidates; else look at more of them.
        if count >= scores.shape[1] or bool((sums[:, -1] >= top_p).all()):
            break
        count *= 8
    inside = (sums - probs < top_p).sum(1, keepdim=True)
    return candidates.gather(1, inside.clamp(min=1) - 1)[:, 0]


def _log_sum_exp(scores: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return the log-sum-exp (N,) of `scores` (N, V) over all slices."""
    largest = scores.amax(1, keepdim=True)
    # On a CPU, log_softmax takes half the time of logsumexp. A slice that has only padding has no softmax.
    total = torch.where(largest == -torch.inf, largest, largest - scores.log_softmax(1).amax(1, keepdim=True))
    joined = vocabulary.join(total)[..., 0]
    return joined[0] if len(joined) == 1 else joined.logsumexp(0)


def _best(values: Tensor, scores: Tensor, total: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the token (N,) with the largest of `values` (N, V) over all slices, and its score minus `total` (N,).

    Of equal values, that of the lowest token id is taken.
    """
    best, column = _first_largest(values)
    score = best if values is scores else scores.gather(1, column[:, None])[:, 0]
    if vocabulary is FULL_VOCABULARY:
        return column, (score.double() - total.double()).to(scores.dtype)
    ids = (column + vocabulary.first).to(torch.float64)
    joined = vocabulary.join(torch.stack((best.double(), ids, score.double()), dim=1))
    slices = joined[..., 0].argmax(0)[None, :, None].expand(1, -1, joined.shape[2])
    _, token, chosen = joined.gather(0, slices)[0].unbind(1)
    return token.long(), (chosen - total.double()).to(scores.dtype)


def _first_largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row of `values` (N, V), and the first column that has it, each (N,)."""
    if values.device.type != "cpu":
        best = values.max(1)
        return best.values, best.indices
    # NumPy's search for the index takes a tenth of PyTorch's time.
    column = torch.from_numpy(values.numpy().argmax(1))
    return values.gather(1, column[:, None])[:, 0], column
