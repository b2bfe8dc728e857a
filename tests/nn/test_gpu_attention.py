"""The choice of attention kernels on a GPU, on CPU tensors: stand-ins of the kernels take what the kernels take."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from kumi.nn.attention import flash_partial, grouped_query
from kumi.nn.attention.attention_context import OnHost, Segments, document_bounds, segments, visible
from kumi.nn.attention.grouped_query import attend

ROWS, LENGTH = 2, 11
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]])


def _varlen(q, k, v, bounds, *, longest, window, scale=None):
    """The variable-length kernel: one head size of at most 256, a multiple of 8."""
    sizes = {x.shape[-1] for x in (q, k, v)}
    assert len(sizes) == 1
    assert all(size % 8 == 0 and size <= 256 for size in sizes), "the kernel refuses this head size"
    assert longest == LENGTH
    parts = []
    for first, last in pairwise(bounds.tolist()):
        part = [x[first:last].transpose(0, 1)[None] for x in (q, k, v)]
        seen = visible(None, last - first, window, q.device)
        out = F.scaled_dot_product_attention(*part, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def calls(monkeypatch):
    """Every call of the variable-length kernel, which CPU tensors may use too."""
    made = []

    def varlen(*args, **kwargs):
        made.append(args[0].shape[-1])
        return _varlen(*args, **kwargs)

    monkeypatch.setattr(grouped_query, "has_varlen", lambda q: True)
    monkeypatch.setattr(flash_partial, "has_varlen", lambda q: True)
    monkeypatch.setattr(grouped_query, "varlen_attention", varlen)
    return made


def inputs(size, value_size=None, *, heads=4, kv_heads=2):
    random = torch.Generator().manual_seed(0)
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size or size), (heads, value_size or size))
    *qkv, grad = (torch.randn(ROWS, LENGTH, *shape, generator=random, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in qkv], grad


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("size", "value_size", "padded"),
    [(8, 8, 8), (12, 12, 16), (12, 7, 16), (100, 100, 104), (256, 64, 256), (250, 250, 256)],
)
def test_head_sizes_of_packed_documents_are_padded_to_those_of_the_kernel(calls, size, value_size, padded, window):
    qkv, grad = inputs(size, value_size)
    expected = attend(Segments(DOCUMENTS, None), *qkv, window)
    result = attend(Segments(DOCUMENTS, document_bounds(DOCUMENTS)), *qkv, window)
    assert calls == [padded]
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result, qkv, grad), torch.autograd.grad(expected, qkv, grad))


@pytest.mark.parametrize("size", [257, 320, 512])
def test_larger_heads_are_computed_with_a_mask(calls, size):
    qkv, _ = inputs(size)
    result = attend(Segments(DOCUMENTS, document_bounds(DOCUMENTS)), *qkv, None)
    assert calls == []
    torch.testing.assert_close(result, attend(segments(torch.zeros(ROWS, LENGTH), DOCUMENTS), *qkv, None))


def test_whole_rows_are_not_packed(calls):
    qkv, _ = inputs(8)
    rows = torch.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=torch.int32)
    result = attend(Segments(None, rows), *qkv, None)
    assert calls == []
    torch.testing.assert_close(result, attend(segments(torch.zeros(ROWS, LENGTH), None), *qkv, None))


def test_layers_share_the_mask_of_a_window(monkeypatch):
    documents, masks = Segments(DOCUMENTS, document_bounds(DOCUMENTS)), []
    plain = F.scaled_dot_product_attention

    def sdpa(*args, attn_mask, **kwargs):
        masks.append(attn_mask)
        return plain(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    for window in (None, 3, None, 3):
        attend(documents, *inputs(8)[0], window)
    assert masks[0] is masks[2]
    assert masks[1] is masks[3]
    assert masks[0] is not masks[1]
    assert all(mask.dtype == torch.float64 for mask in masks), "a mask of bools is converted in every layer"


def test_without_flash_no_kernel_gets_fewer_key_heads(monkeypatch):
    """PyTorch's other kernel of a GPU has none: it would hold all S x S scores."""
    seen = []
    plain = F.scaled_dot_product_attention

    def sdpa(q, k, v, **kwargs):
        seen.append((q.shape[1], k.shape[1], kwargs["enable_gqa"]))
        return plain(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    attend(Segments(None, None), *inputs(8)[0], None)
    assert seen == [(4, 4, False)]


def test_the_host_knows_the_boundaries_without_reading_the_device():
    given = segments(torch.zeros(ROWS, LENGTH), DOCUMENTS, (0, 4, 5, 11, 22))
    assert given.cu_seqlens_list == segments(torch.zeros(ROWS, LENGTH), DOCUMENTS).cu_seqlens_list == [0, 4, 5, 11, 22]
    assert Segments(DOCUMENTS, torch.zeros(1), OnHost([0, 11, 22])).cu_seqlens_list == [0, 11, 22]
