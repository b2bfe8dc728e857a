"""Ring attention equals attention over unsharded rows on one rank."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from kumi.nn.attention import partial_attention
from kumi.nn.attention.attention_context import Segments, segments
from kumi.nn.attention.grouped_query import attend
from kumi.parallel.ring_attention import _plans, positions_of_rank, ring_attention_fn
from nn.test_flash_parts import ON_CPU

ROWS = 2
TOLERANCE = 1e-12


def _documents(length, lengths):
    """Return document ids (ROWS, length): rows of documents of `lengths`, and one row of a single document."""
    again = torch.tensor(lengths * length)
    ids = torch.repeat_interleave(torch.arange(len(again)), again)[:length]
    return torch.stack([ids, torch.zeros_like(ids)])


def _inputs(length, heads, kv_heads, size, v_size, dtype=torch.float64):
    random = torch.Generator().manual_seed(0)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, v_size), (heads, v_size)]
    return [torch.randn(ROWS, length, *shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def pairs(count):
    """Return the size of a block with `count` keys, in place of `key_size`."""
    return -(-count // 2) * 2


def _around(length, heads, sizes, lengths, window, strided):
    """Return the largest errors of result and gradients of a rank's positions, compared to unsharded rows."""
    _plans.cache_clear()
    with patch.multiple(partial_attention, QUERY_BLOCKS={"cpu": 4}, key_size=pairs, QUERY_ALIGNMENT=2):
        errors = _differences(length, heads, sizes, lengths, window, strided)
    _plans.cache_clear()
    return errors


def _differences(length, heads, sizes, lengths, window, strided):
    *qkv, grad = _inputs(length, *heads, *sizes)
    ids = None if lengths is None else _documents(length, lengths)
    where = segments(torch.zeros(ROWS, length), ids)
    for x in qkv:
        x.requires_grad_()
    whole = attend(Segments(ids, None), *qkv, window)
    expected = [whole, *torch.autograd.grad(whole, qkv, grad)]
    mine = positions_of_rank(length, dist.get_world_size(), dist.get_rank())
    parts = [x.detach()[:, mine] for x in qkv]
    if strided:
        parts = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in parts]
    for x in parts:
        x.requires_grad_()
    out = ring_attention_fn(where.cu_seqlens, dist.group.WORLD)(*parts, window)
    own_grad = grad[:, mine].transpose(1, 2).contiguous().transpose(1, 2) if strided else grad[:, mine]
    actual = [out, *torch.autograd.grad(out, parts, own_grad)]
    assert out.is_contiguous()
    return max(float((a - b[:, mine]).detach().abs().max()) for a, b in zip(actual, expected, strict=True))


CASES = {
    "whole rows": ((4, 2), (6, 6), None, None),
    "every head its own": ((3, 3), (4, 4), None, None),
    "documents across pieces": ((4, 2), (6, 6), (5, 9, 1, 7), None),
    "documents that end with pieces": ((4, 1), (6, 6), (4, 8, 12), None),
    "short documents": ((2, 2), (4, 4), (1, 2, 3), None),
    "window": ((4, 2), (6, 6), None, 7),
    "window of one": ((4, 2), (6, 6), None, 1),
    "window and documents": ((4, 2), (6, 6), (5, 17, 3), 6),
    "values of another size": ((4, 2), (6, 10), (5, 9), None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_equals_whole_rows(ranks, cp, name):
    heads, sizes, lengths, window = CASES[name]
    assert max(ranks(cp, _around, 12 * cp, heads, sizes, lengths, window, False)) < TOLERANCE


def test_tensors_may_lie_anyhow(ranks):
    assert max(ranks(2, _around, 24, (4, 2), (6, 10), (5, 9), 7, True)) < TOLERANCE


def _around_by_kernels(lengths):
    """On a rank: as `_around`, where a device has fused kernels."""
    with ON_CPU:
        return _differences(24, (4, 2), (8, 8), lengths, None, True)


@pytest.mark.parametrize("lengths", [None, (5, 9, 1, 7)])
def test_fused_kernels_go_round(ranks, lengths):
    assert max(ranks(2, _around_by_kernels, lengths)) < TOLERANCE


def test_positions():
    assert [positions_of_rank(8, 2, index).tolist() for index in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
