"""Block-wise packed attention against masked SDPA."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from kumi.nn import cpu_attention
from kumi.nn.attention import attend, visible
from kumi.nn.cpu_attention import packed_attention
from kumi.nn.where import Segments, segments

ROWS, LENGTH, SIZE = 2, 11, 4


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(cpu_attention, "BLOCK", 3)


def inputs(heads, kv_heads, dtype=torch.float64, value_size=SIZE):
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, SIZE), (kv_heads, SIZE), (kv_heads, value_size), (heads, value_size))
    shapes = [(ROWS, LENGTH, *size) for size in sizes]
    *qkv, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in qkv], grad


DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]])


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 50])
@pytest.mark.parametrize("document_ids", [None, DOCUMENTS], ids=["rows", "documents"])
def test_equals_masked_sdpa(heads, window, document_ids):
    qkv, grad = inputs(*heads)
    where = segments(torch.zeros(ROWS, LENGTH), document_ids)
    found = attend(where, *qkv, window)
    # The way taken on other devices: it must agree, too.
    expected = attend(Segments(document_ids, None), *qkv, window)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, qkv, grad), torch.autograd.grad(expected, qkv, grad))


@pytest.mark.parametrize("value_size", [2, 6])
def test_values_may_be_of_another_size_than_keys(value_size):
    qkv, grad = inputs(4, 2, value_size=value_size)
    where = segments(torch.zeros(ROWS, LENGTH), DOCUMENTS)
    found, expected = attend(where, *qkv, 5), attend(Segments(DOCUMENTS, None), *qkv, 5)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, qkv, grad), torch.autograd.grad(expected, qkv, grad))
    q, k, v = (x.detach().to("meta") for x in qkv)
    assert cpu_attention.OPERATOR(q, k, v, [0, LENGTH, 2 * LENGTH], 0).shape == found.shape


def _plainly(q, k, v, sinks, window):
    """Attention with sinks in the simplest words: a softmax over scores and the sink, whose weight is dropped."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bshe,bthe->bhst", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible(DOCUMENTS, LENGTH, window, q.device), -torch.inf)
    column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("bhst,bthe->bshe", weights, v)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("bounds", ["here", "other devices"])
def test_sinks(heads, window, bounds):
    qkv, grad = inputs(*heads, value_size=6)
    sinks = torch.linspace(-2, 3, heads[0], dtype=torch.float64).requires_grad_()
    where = segments(torch.zeros(ROWS, LENGTH), DOCUMENTS) if bounds == "here" else Segments(DOCUMENTS, None)
    found, expected = attend(where, *qkv, window, sinks), _plainly(*qkv, sinks, window)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, [*qkv, sinks], grad) for out in (found, expected)))
    # A sink that nobody looks at changes nothing.
    torch.testing.assert_close(attend(where, *qkv, window, sinks - 100), attend(where, *qkv, window))


def test_the_mask_of_other_devices_is_right():
    qkv, _ = inputs(2, 2)
    out = attend(Segments(DOCUMENTS, None), *qkv, 3)
    row, position, head = 0, 8, 1
    q, k, v = (x[row, :, head] for x in qkv)
    seen = slice(6, 9)
    weights = torch.softmax(q[position] @ k[seen].T / SIZE**0.5, dim=-1)
    torch.testing.assert_close(out[row, position, head], weights @ v[seen])


def test_gradcheck():
    qkv, _ = inputs(2, 1)
    where = segments(torch.zeros(ROWS, LENGTH), DOCUMENTS)
    assert torch.autograd.gradcheck(lambda *x: attend(where, *x, 4), qkv)


def test_bfloat16_is_as_close_as_the_kernel_of_pytorch():
    qkv, _ = inputs(4, 2, torch.bfloat16)
    wide = [x.detach().double() for x in qkv]
    bounds = list(range(0, ROWS * LENGTH + 1, LENGTH))
    exact = packed_attention(*wide, bounds, None)
    ours = (packed_attention(*qkv, bounds, None).double() - exact).abs().max()
    q, k, v = (x.transpose(1, 2) for x in qkv)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert ours <= 1.5 * (theirs.double() - exact).abs().max()


def test_the_operator_is_well_formed():
    qkv, _ = inputs(4, 2, torch.float32)
    torch.library.opcheck(cpu_attention.OPERATOR, (*qkv, [0, 4, 11, 22], 0))
    torch.library.opcheck(cpu_attention.OPERATOR, (*qkv, [0, 4, 11, 22], 0, torch.randn(4, requires_grad=True)))


def test_flops_are_counted_as_those_of_sdpa():
    qkv, grad = inputs(4, 2, torch.float32)
    shape = (ROWS, 4, LENGTH, SIZE)
    with FlopCounterMode(display=False) as forward:
        out = packed_attention(*qkv, [0, 11, 22], None)
    assert forward.get_total_flops() == sdpa_flop_count(shape, shape, shape)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, qkv, grad)
    assert backward.get_total_flops() == sdpa_backward_flop_count(shape, shape, shape, shape)


def test_segments():
    assert segments(torch.zeros(2, 3), None).bounds == [0, 3, 6]
    assert segments(torch.zeros(ROWS, LENGTH), DOCUMENTS).bounds == [0, 4, 5, 11, 22]
    # Equal ids in neighbouring rows are still two documents.
    assert segments(torch.zeros(2, 3), torch.ones(2, 3)).bounds == [0, 3, 6]
