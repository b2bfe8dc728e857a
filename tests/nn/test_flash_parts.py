"""Partial attention by fused kernels adds up to full attention, for any ranges of the rows."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from kumi.nn.attention import flash_partial
from kumi.nn.attention.attention_context import Segments
from kumi.nn.attention.flash_partial import FlashKernels
from kumi.nn.attention.grouped_query import attend
from kumi.parallel.ring_attention import positions_of_rank

ROWS = 2


def _documents(documents, rows, length):
    bounds = range(0, rows * length + 1, length) if documents is None else documents.cu_seqlens.tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]


def _heads(x, heads):
    """`x` (T, K, E) as the CPU's kernel takes it, (1, H, T, E)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)[None]


def _mask(causal, window, length):
    """Return the arguments of the CPU's kernel for a causal mask or a window: (is_causal, mask)."""
    if window is None:
        return causal, None
    place = torch.arange(length)
    distance = place[:, None] - place
    hidden = (distance < 0) | (distance >= window)
    return False, torch.zeros(length, length, dtype=torch.float64).masked_fill(hidden, -torch.inf)


def forward(q, k, v, options):
    """`FlashKernels.forward` by the CPU's kernel, document by document."""
    causal, documents, window, scale = options
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    flat_q, flat_k, flat_v, flat_out, flat_lse = (x.flatten(0, 1) for x in (q, k, v, out, lse))
    ends = zip(_documents(documents, *q.shape[:2]), _documents(documents, *k.shape[:2]), strict=True)
    for queries, keys in ends:
        tensors = [_heads(x, q.shape[2]) for x in (flat_q[queries], flat_k[keys], flat_v[keys])]
        plain, mask = _mask(causal, window, len(flat_q[queries]))
        compute, how = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, {"attn_mask": mask, "scale": scale}
        row_out, sums = compute(*tensors, 0.0, plain, **how)
        flat_out[queries], flat_lse[queries] = row_out[0].transpose(0, 1), sums[0].T
    return out, lse


def backward(grad, q, k, v, out, lse, options):
    """`FlashKernels.backward` by the CPU's kernel, document by document."""
    causal, documents, window, scale = options
    totals = [torch.empty_like(x) for x in (q, k, v)]
    flat = [x.flatten(0, 1) for x in (grad, q, k, v, out, lse, *totals)]
    ends = zip(_documents(documents, *q.shape[:2]), _documents(documents, *k.shape[:2]), strict=True)
    for queries, keys in ends:
        where = (queries, queries, keys, keys, queries)
        tensors = [_heads(x[places], q.shape[2]) for x, places in zip(flat[:5], where)]
        sums = flat[5][queries].T[None].contiguous()
        plain, mask = _mask(causal, window, len(flat[1][queries]))
        compute = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = compute(*tensors, sums, 0.0, plain, attn_mask=mask, scale=scale)
        for target, places, part in zip(flat[6:], (queries, keys, keys), grads):
            target[places] = part[0].transpose(0, 1).unflatten(1, (target.shape[1], -1)).sum(2)
    return totals


ON_CPU = patch.dict(
    flash_partial.FLASH_KERNELS, cpu=FlashKernels(lambda q, v: q.shape[-1] == v.shape[-1], forward, backward)
)
LENGTHS = {
    "whole rows": None,
    "across pieces": (5, 9, 1, 7),
    "ending with pieces": (4, 8, 12),
    "short": (1, 2, 3),
    "of a row": (40,),
}


def documents_of(length, lengths):
    """Return document ids (ROWS, length) of rows of documents of `lengths` and one single document, and cu_seqlens."""
    again = torch.tensor((lengths or (length,)) * length)
    ids = torch.repeat_interleave(torch.arange(len(again)), again)[:length]
    ids = torch.stack([ids, torch.zeros_like(ids)])
    first = torch.cat([torch.ones(ROWS, 1, dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], dim=1)
    return ids, (*first.flatten().nonzero()[:, 0].tolist(), ROWS * length)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_parts_add_up(cp, name):
    length = 12 * cp
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(ROWS, length, heads, 8, generator=random, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )
    ids, bounds = documents_of(length, LENGTHS[name])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = attend(Segments(ids, None), *leaves, None)
    expected = torch.autograd.grad(whole, leaves, grad)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    with ON_CPU:
        for index in range(cp):
            own = positions_of_rank(length, cp, index)
            out, lse = torch.zeros_like(q[:, own]), torch.full((ROWS, len(own), 4), -torch.inf, dtype=torch.float64)
            seen = [
                (other, flash_partial.attention_tiles(bounds, ROWS, own, other, q.device))
                for other in (positions_of_rank(length, cp, (index - turn) % cp) for turn in range(cp))
            ]
            for other, tiles in seen:
                flash_partial.attend_tiles(q[:, own], k[:, other], v[:, other], tiles, out, lse)
            assert (out - whole[:, own]).abs().max() < 1e-12
            for other, tiles in seen:
                parts = [torch.zeros_like(x[:, at]) for x, at in zip((q, k, v), (own, other, other))]
                ends = grad[:, own], q[:, own], k[:, other], v[:, other]
                flash_partial.attend_tiles_backward(*ends, tiles, out, lse, *parts)
                for total, at, part in zip(grads, (own, other, other), parts):
                    total[:, at] += part
    assert max(float((a - b).abs().max()) for a, b in zip(grads, expected, strict=True)) < 1e-12


def test_one_kernel_a_round_where_rows_are_whole():
    """All queries see the first chunk of earlier ranks; the last chunk's queries see all keys of later ranks."""
    places = [positions_of_rank(48, 3, index) for index in range(3)]
    tiles = [
        flash_partial.attention_tiles((0, 48, 96), ROWS, places[1], other, torch.device("cpu")) for other in places
    ]
    every, rows = slice(0, 16), slice(None)
    assert tiles[0] == (flash_partial.Tile(rows, every, slice(0, 8)),)
    assert tiles[1] == (flash_partial.Tile(rows, rows, rows, causal=True),)
    assert tiles[2] == (flash_partial.Tile(rows, slice(8, 16), every),)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", LENGTHS)
def test_sinks_scale_what_a_kernel_gives(name, window):
    length = 24
    random = torch.Generator().manual_seed(0)
    *qkv, grad = (torch.randn(ROWS, length, heads, 8, generator=random, dtype=torch.float64) for heads in (4, 2, 2, 4))
    leaves = [*qkv, torch.linspace(-2, 3, 4, dtype=torch.float64)]
    ids, bounds = documents_of(length, LENGTHS[name])
    for actual in leaves:
        actual.requires_grad_()
    expected = attend(Segments(ids, None), *leaves[:3], window, leaves[3])
    with ON_CPU:
        result = attend(Segments(ids, torch.tensor(bounds, dtype=torch.int32)), *leaves[:3], window, leaves[3])
        grads = torch.autograd.grad(result, leaves, grad)
    assert (result - expected).abs().max() < 1e-12
    for actual, other in zip(grads, torch.autograd.grad(expected, leaves, grad), strict=True):
        assert (actual - other).abs().max() < 1e-12
