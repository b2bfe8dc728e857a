"""Attention over a part of the keys by fused kernels, for ring attention without windows in 16 bits.

Fused kernels hold no scores and take no arbitrary mask. No mask is needed: a document is a contiguous part of its row,
so at most one document crosses from one rank's piece to another's. Every query range of a `Tile` therefore sees its
complete key range. Only the keys of the queries' rank need a causal mask, within each document.

Partial results are merged by their log-sum-exp, as in `kumi.nn.attention.partial_attention`. Given the final result
and its log-sum-exp, a kernel's backward pass returns the gradients through its own keys (Liu et al., 2023,
arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kumi.compat import flash_backward, flash_forward, has_varlen
from kumi.nn.attention.partial_attention import grad_of_sinks

# The largest head size of the kernels.
_LARGEST_HEAD = 256


class PackedDocuments(NamedTuple):
    """Document boundaries, as variable-length kernels take them.

    `cu_seqlens` (documents + 1,) int32: the first token of each document, counted through all rows, followed by the
    number of tokens.
    `max_seqlen`: tokens of the longest document.
    """

    cu_seqlens: Tensor
    max_seqlen: int


class Tile(NamedTuple):
    """A range of queries and the range of keys of the same `rows` that it attends to.

    `causal`: a query sees only its past. Otherwise it sees all keys of the range.
    `documents`: boundaries of the documents that must not see each other; None if every row is one document.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    documents: PackedDocuments | None = None


class KernelOptions(NamedTuple):
    """The options of one kernel call.

    `causal`: a query sees only its past.
    `documents`: boundaries of the documents that must not see each other, or None.
    `window`: number of latest keys that a query sees, or None.
    `scale`: of the scores; None for 1 / sqrt(E).
    """

    causal: bool
    documents: PackedDocuments | None
    window: int | None
    scale: float | None


# (q (B, N, H, E), k (B, M, K, E), v (B, M, K, E'), options) -> the result (B, N, H, E'), its log-sum-exp (B, N, H).
FlashForward = Callable[[Tensor, Tensor, Tensor, KernelOptions], tuple[Tensor, Tensor]]
# (gradient (B, N, H, E'), q, k, v, result, log-sum-exp, options) -> the gradients of q, k and v.
FlashBackward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, KernelOptions], tuple[Tensor, Tensor, Tensor]]


class FlashKernels(NamedTuple):
    """The fused attention kernels of one device type.

    `takes(q, v)`: returns True if the kernels support queries `q` (B, N, H, E) with values `v` (B, M, K, E').
    `forward`, `backward`: the two passes.
    """

    takes: Callable[[Tensor, Tensor], bool]
    forward: FlashForward
    backward: FlashBackward


def supports_flash(q: Tensor, v: Tensor) -> bool:
    """Return True if this device has kernels for queries and values like these."""
    return q.device.type in FLASH_KERNELS and FLASH_KERNELS[q.device.type].takes(q, v)


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], out: Tensor, lse: Tensor, scale: float | None = None
) -> None:
    """Merge the attention of `q` (B, N, H, E) over `k` (B, M, K, E) and `v` (B, M, K, E') into `out` and `lse`.

    `out` (B, N, H, E') and `lse` (B, N, H) are in the dtype of scores; they start as 0 and -inf.
    `scale`: of the scores; None for 1 / sqrt(E).
    """
    for rows, queries, keys, causal, documents in tiles:
        kernel = FLASH_KERNELS[q.device.type].forward
        partial, partial_lse = kernel(
            q[rows, queries], k[rows, keys], v[rows, keys], KernelOptions(causal, documents, None, scale)
        )
        old_lse, old_out = lse[rows, queries], out[rows, queries]
        old_out.lerp_(partial.to(out.dtype), torch.sigmoid(partial_lse - old_lse)[..., None])
        torch.logaddexp(old_lse, partial_lse, out=old_lse)


def attend_tiles_backward(
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
    """Add the gradients through these keys to `grad_q`, `grad_k` and `grad_v`, which are in the dtype of scores.

    `grad`, `out` and `lse` are the gradient, the result and the log-sum-exp over all parts.
    """
    for rows, queries, keys, causal, documents in tiles:
        inputs = grad[rows, queries], q[rows, queries], k[rows, keys], v[rows, keys]
        kernel = FLASH_KERNELS[q.device.type].backward
        options = KernelOptions(causal, documents, None, scale)
        partial_q, partial_k, partial_v = kernel(*inputs, out[rows, queries], lse[rows, queries], options)
        grad_q[rows, queries] += partial_q
        grad_k[rows, keys] += partial_k
        grad_v[rows, keys] += partial_v


def flash_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor, cu_seqlens: Tensor, scale: float | None = None
) -> Tensor:
    """Return causal attention (B, S, H, E') with sinks.

    `window`: number of latest keys that a query sees, or None.
    `sinks` (H,): one more score per head in the softmax, as of a key with a zero value.
    `cu_seqlens` int32: the first token of each document, counted through all rows, followed by the number of tokens.
    `scale`: of the scores; None for 1 / sqrt(E).
    """
    options = KernelOptions(True, PackedDocuments(cu_seqlens, q.shape[1]), window, scale)
    out: Tensor = _WithSinks.apply(q, k, v, sinks, options)  # type: ignore[no-untyped-call]
    return out


class _WithSinks(torch.autograd.Function):
    """Attention with sinks by kernels that have none: a sink multiplies the result by a factor of the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, options: KernelOptions) -> Tensor:
        ctx.options = options
        out, lse = FLASH_KERNELS[q.device.type].forward(q, k, v, options)
        score = sinks.to(lse.dtype)
        out = (out * torch.sigmoid(lse - score)[..., None]).to(q.dtype)
        lse = torch.logaddexp(lse, score)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grads = FLASH_KERNELS[q.device.type].backward(grad, q, k, v, out, lse, ctx.options)
        return *grads, grad_of_sinks(grad, out, lse, sinks), None


def attention_tiles(
    cu_seqlens: tuple[int, ...], rows: int, own: Tensor, other: Tensor, device: torch.device
) -> tuple[Tile, ...]:
    """Return the tiles of queries at positions `own` (N,) over keys at positions `other` (N,) of each row.

    Both sets of positions are two contiguous pieces of the row.
    `cu_seqlens`: the first token of each document, counted through the rows, followed by the number of tokens.
    """
    length = cu_seqlens[-1] // rows
    boundaries = torch.tensor(cu_seqlens)
    ids = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), boundaries.diff()).view(rows, length)
    if torch.equal(own, other):
        return (_own_tile(ids[:, own], device),)
    ranges = [tuple(_visible_ranges(row, own, other)) for row in ids]
    if all(pairs == ranges[0] for pairs in ranges):
        return tuple(Tile(slice(None), slice(*queries), slice(*keys)) for queries, keys in ranges[0])
    return tuple(
        Tile(slice(row, row + 1), slice(*queries), slice(*keys))
        for row, pairs in enumerate(ranges)
        for queries, keys in pairs
    )


def _own_tile(ids: Tensor, device: torch.device) -> Tile:
    """Return the tile of a rank's queries over its own keys, given their document numbers `ids` (B, N).

    The local tokens of a document are contiguous.
    """
    rows, count = ids.shape
    everything = slice(None)
    begins = torch.cat([torch.ones(rows, 1, dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], dim=1)
    cu_seqlens = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([rows * count])])
    if len(cu_seqlens) == rows + 1:
        return Tile(everything, everything, everything, causal=True)
    return Tile(
        everything,
        everything,
        everything,
        True,
        PackedDocuments(cu_seqlens.int().to(device), int(cu_seqlens.diff().max())),
    )


_Range = tuple[int, int]


def _visible_ranges(ids: Tensor, own: Tensor, other: Tensor) -> Iterator[tuple[_Range, _Range]]:
    """Yield the pairs of a query range and a key range that attend to each other in one row.

    `ids`: the document number of each position of the row.
    """
    half = len(own) // 2
    ranges: list[tuple[_Range, _Range]] = []
    for first in (0, half):
        for start in (0, half):
            queries, keys = ids[own[first : first + half]], ids[other[start : start + half]]
            # The queries see keys only if they begin in the document in which the keys end.
            num_queries, num_keys = int((queries == keys[-1]).sum()), int((keys == keys[-1]).sum())
            if other[start] < own[first] and num_queries:
                ranges.append(((first, first + num_queries), (start + half - num_keys, start + half)))
    if len(ranges) == 2:
        (queries_1, keys_1), (queries_2, keys_2) = ranges
        if keys_1 == keys_2 and queries_1[1] == queries_2[0]:
            ranges = [((queries_1[0], queries_2[1]), keys_1)]
        elif queries_1 == queries_2 and keys_1[1] == keys_2[0]:
            ranges = [(queries_1, (keys_1[0], keys_2[1]))]
    yield from ranges


def supports_packed(q: Tensor, v: Tensor) -> bool:
    """Return True if PyTorch's variable-length kernel computes queries and values like these once they are padded to
    `kernel_head_size`."""
    return has_varlen(q) and kernel_head_size(q.shape[-1]) <= _LARGEST_HEAD and v.shape[-1] <= q.shape[-1]


def kernel_head_size(size: int) -> int:
    """Return the smallest head size of the kernels that is at least `size`: they take multiples of 8 only."""
    return -(-size // 8) * 8


def _supports(q: Tensor, v: Tensor) -> bool:
    return supports_packed(q, v) and q.shape[-1] % 8 == 0


def padded_heads(x: Tensor, size: int) -> Tensor:
    """Return `x` with heads zero-padded to `size` elements: kernels need the same head size for queries, keys and
    values."""
    return F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x


def _forward(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> tuple[Tensor, Tensor]:
    value_size, v, (causal, documents, window, scale) = v.shape[-1], padded_heads(v, q.shape[-1]), options
    kwargs: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    if documents is None:
        out, lse = flash_forward(q, k, v, None, q.shape[1], k.shape[1], **kwargs)
        return out[..., :value_size], lse.transpose(1, 2)
    sizes = documents.cu_seqlens, documents.max_seqlen, documents.max_seqlen
    out, lse = flash_forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *sizes, **kwargs)
    return out.view(q.shape)[..., :value_size], lse.T.view(q.shape[:3])


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: KernelOptions
) -> tuple[Tensor, Tensor, Tensor]:
    value_size, (grad, v, out) = v.shape[-1], (padded_heads(x, q.shape[-1]) for x in (grad, v, out))
    causal, documents, window, scale = options
    kwargs: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    if documents is None:
        sums = lse.transpose(1, 2).contiguous()
        grad_q, grad_k, grad_v = flash_backward(grad, q, k, v, out, sums, None, q.shape[1], k.shape[1], **kwargs)
        return grad_q, grad_k, grad_v[..., :value_size]
    flat_grad, flat_q, flat_k, flat_v, flat_out = (x.flatten(0, 1) for x in (grad, q, k, v, out))
    sums, sizes = lse.flatten(0, 1).T.contiguous(), (documents.cu_seqlens, documents.max_seqlen, documents.max_seqlen)
    grad_q, grad_k, grad_v = flash_backward(flat_grad, flat_q, flat_k, flat_v, flat_out, sums, *sizes, **kwargs)
    return grad_q.view(q.shape), grad_k.view(k.shape), grad_v.view(v.shape)[..., :value_size]


FLASH_KERNELS: dict[str, FlashKernels] = {"cuda": FlashKernels(_supports, _forward, _backward)}
