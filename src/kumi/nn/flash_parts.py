"""Attention of a ring's parts by fused kernels, which hold no scores: for rows without windows, in 16 bits.

Of the keys that come in a round, a stretch of queries sees a stretch of keys, all of it: documents are stretches of
their row, so at most one goes on from one piece to another. Only a rank's own keys take a causal mask, over what it has
of each document. Results and their log-sum-exps add up as in `kumi.nn.block_attention`; given the result and the
log-sum-exp over all parts, a kernel's backward pass makes the part of the gradients that goes through its own keys (Liu
et al., 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kumi.compat import flash_backward, flash_forward, has_varlen
from kumi.nn.block_attention import grad_of_sinks

# Heads of more elements have no kernel.
LARGEST_HEAD = 256


class Marks(NamedTuple):
    """Where documents begin among the tokens of all rows together, and how many tokens there are, (documents + 1,)
    int32; and the length of the longest."""

    bounds: Tensor
    longest: int


class Tile(NamedTuple):
    """Queries over keys of the same `rows`: all of them; or with `causal`, each over its past, within the documents
    that `marks` tells apart (None: a row is one)."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    marks: Marks | None = None


class Sight(NamedTuple):
    """What queries see: all keys, or with `causal` their past, within the documents of `marks` and the `window`; and
    what scores are multiplied by, None for 1 / sqrt(E)."""

    causal: bool
    marks: Marks | None
    window: int | None
    scale: float | None


# (q (B, N, H, E), k (B, M, K, E), v (B, M, K, E'), sight) gives the result (B, N, H, E') and the log-sum-exp (B, N, H).
Forward = Callable[[Tensor, Tensor, Tensor, Sight], tuple[Tensor, Tensor]]
# (gradient (B, N, H, E'), q, k, v, result, log-sum-exp, sight) gives the gradients of q, k and v.
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sight], tuple[Tensor, Tensor, Tensor]]


class Kernels(NamedTuple):
    """What a kind of device has: whether for queries (B, N, H, E) and values (B, M, K, E'), and the two passes."""

    takes: Callable[[Tensor, Tensor], bool]
    forward: Forward
    backward: Backward


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether there are kernels for queries and values like these."""
    return q.device.type in KERNELS and KERNELS[q.device.type].takes(q, v)


def forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], out: Tensor, lse: Tensor, scale: float | None = None
) -> None:
    """Merges into `out` (B, N, H, E') and `lse` (B, N, H), in the dtype of scores, 0 and -inf where nothing was seen
    yet, what `q` (B, N, H, E) sees of `k` (B, M, K, E) and `v` (B, M, K, E'), with scores multiplied by `scale`."""
    for rows, queries, keys, causal, marks in tiles:
        run = KERNELS[q.device.type].forward
        seen, sums = run(q[rows, queries], k[rows, keys], v[rows, keys], Sight(causal, marks, None, scale))
        before, result = lse[rows, queries], out[rows, queries]
        result.lerp_(seen.to(out.dtype), torch.sigmoid(sums - before)[..., None])
        torch.logaddexp(before, sums, out=before)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: tuple[Tile, ...],
    out: Tensor,
    lse: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    scale: float | None = None,
) -> None:
    """Adds to `grad_q`, `grad_k` and `grad_v`, in the dtype of scores, what comes through these keys. `grad`, `out` and
    `lse` are those of the result over all parts."""
    for rows, queries, keys, causal, marks in tiles:
        ends = grad[rows, queries], q[rows, queries], k[rows, keys], v[rows, keys]
        run = KERNELS[q.device.type].backward
        sight = Sight(causal, marks, None, scale)
        of_q, of_k, of_v = run(*ends, out[rows, queries], lse[rows, queries], sight)
        grad_q[rows, queries] += of_q
        grad_k[rows, keys] += of_k
        grad_v[rows, keys] += of_v


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor, bounds: Tensor, scale: float | None = None
) -> Tensor:
    """Causal attention (B, S, H, E') within the documents that begin at `bounds` (int32) and the `window`, where each
    query also looks at nothing, with its head's score in `sinks` (H,); the others are multiplied by `scale`."""
    sight = Sight(True, Marks(bounds, q.shape[1]), window, scale)
    out: Tensor = _WithSinks.apply(q, k, v, sinks, sight)  # type: ignore[no-untyped-call]
    return out


class _WithSinks(torch.autograd.Function):
    """No kernel has sinks; but they only scale the result, and the log-sum-exp tells how much."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, sight: Sight) -> Tensor:
        ctx.sight = sight
        out, lse = KERNELS[q.device.type].forward(q, k, v, sight)
        score = sinks.to(lse.dtype)
        out = (out * torch.sigmoid(lse - score)[..., None]).to(q.dtype)
        lse = torch.logaddexp(lse, score)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        found = KERNELS[q.device.type].backward(grad, q, k, v, out, lse, ctx.sight)
        return *found, grad_of_sinks(grad, out, lse, sinks), None


def tiles(bounds: tuple[int, ...], rows: int, own: Tensor, other: Tensor, device: torch.device) -> tuple[Tile, ...]:
    """What the queries at positions `own` (N,) of each row see of the keys at positions `other` (N,), both two pieces;
    documents begin at the tokens `bounds`, numbered through the rows, which also end with their count."""
    length = bounds[-1] // rows
    marks = torch.tensor(bounds)
    ids = torch.repeat_interleave(torch.arange(len(bounds) - 1), marks.diff()).view(rows, length)
    if torch.equal(own, other):
        return (_own(ids[:, own], device),)
    found = [tuple(_stretches(row, own, other)) for row in ids]
    if all(one == found[0] for one in found):
        return tuple(Tile(slice(None), slice(*queries), slice(*keys)) for queries, keys in found[0])
    return tuple(
        Tile(slice(row, row + 1), slice(*queries), slice(*keys))
        for row, one in enumerate(found)
        for queries, keys in one
    )


def _own(ids: Tensor, device: torch.device) -> Tile:
    """A rank's queries over its own keys, given their documents (B, N): what it has of one lies together."""
    rows, count = ids.shape
    every = slice(None)
    begins = torch.cat([torch.ones(rows, 1, dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], dim=1)
    bounds = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([rows * count])])
    if len(bounds) == rows + 1:
        return Tile(every, every, every, causal=True)
    return Tile(every, every, every, True, Marks(bounds.int().to(device), int(bounds.diff().max())))


_Stretch = tuple[int, int]


def _stretches(ids: Tensor, own: Tensor, other: Tensor) -> Iterator[tuple[_Stretch, _Stretch]]:
    """Which queries see which keys, as stretches of both, of a row whose positions belong to the documents `ids`."""
    half = len(own) // 2
    found: list[tuple[_Stretch, _Stretch]] = []
    for first in (0, half):
        for start in (0, half):
            queries, keys = ids[own[first : first + half]], ids[other[start : start + half]]
            # The document that the keys end in, if the queries begin in it.
            seeing, seen = int((queries == keys[-1]).sum()), int((keys == keys[-1]).sum())
            if other[start] < own[first] and seeing:
                found.append(((first, first + seeing), (start + half - seen, start + half)))
    if len(found) == 2:
        (queries_1, keys_1), (queries_2, keys_2) = found
        if keys_1 == keys_2 and queries_1[1] == queries_2[0]:
            found = [((queries_1[0], queries_2[1]), keys_1)]
        elif queries_1 == queries_2 and keys_1[1] == keys_2[0]:
            found = [(queries_1, (keys_1[0], keys_2[1]))]
    yield from found


def _takes(q: Tensor, v: Tensor) -> bool:
    size = q.shape[-1]
    return has_varlen(q) and size % 8 == 0 and size <= LARGEST_HEAD and v.shape[-1] <= size


def _wide(x: Tensor, size: int) -> Tensor:
    """`x` with zeros up to `size` elements a head: kernels take heads of one size."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def _forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    own, v, (causal, marks, window, scale) = v.shape[-1], _wide(v, q.shape[-1]), sight
    how: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    if marks is None:
        out, lse = flash_forward(q, k, v, None, q.shape[1], k.shape[1], **how)
        return out[..., :own], lse.transpose(1, 2)
    sizes = marks.bounds, marks.longest, marks.longest
    out, lse = flash_forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *sizes, **how)
    return out.view(q.shape)[..., :own], lse.T.view(q.shape[:3])


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    own, (grad, v, out) = v.shape[-1], (_wide(x, q.shape[-1]) for x in (grad, v, out))
    causal, marks, window, scale = sight
    how: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    if marks is None:
        sums = lse.transpose(1, 2).contiguous()
        of_q, of_k, of_v = flash_backward(grad, q, k, v, out, sums, None, q.shape[1], k.shape[1], **how)
        return of_q, of_k, of_v[..., :own]
    flat_grad, flat_q, flat_k, flat_v, flat_out = (x.flatten(0, 1) for x in (grad, q, k, v, out))
    sums, sizes = lse.flatten(0, 1).T.contiguous(), (marks.bounds, marks.longest, marks.longest)
    of_q, of_k, of_v = flash_backward(flat_grad, flat_q, flat_k, flat_v, flat_out, sums, *sizes, **how)
    return of_q.view(q.shape), of_k.view(k.shape), of_v.view(v.shape)[..., :own]


KERNELS: dict[str, Kernels] = {"cuda": Kernels(_takes, _forward, _backward)}
