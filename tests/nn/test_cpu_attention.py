"""Attention over packed documents on the CPU, in blocks and by PyTorch's kernel, against masked SDPA."""

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from kumi.nn import numerics
from kumi.nn.attention import cpu_attention, cpu_flash
from kumi.nn.attention.attention_context import Segments, segments, visible
from kumi.nn.attention.cpu_attention import packed_attention
from kumi.nn.attention.grouped_query import attend
from kumi.nn.attention.scores import PLAIN_SCORES, Scores
from kumi.nn.threads import run_in_threads
from kumi.spec.numerics import FLASH_CASES

ROWS, LENGTH, SIZE = 2, 11, 4


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(cpu_attention, "QUERY_BLOCK", 3)
    monkeypatch.setattr(cpu_attention, "key_size", lambda count: -(-count // 4) * 4)


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
def test_equals_masked_sdpa(monkeypatch, heads, window, document_ids):
    qkv, grad = inputs(*heads)
    where = segments(torch.zeros(ROWS, LENGTH), document_ids)
    # The way taken on devices other than CPU and CUDA.
    expected = attend(Segments(document_ids, None), *qkv, window)
    gradients = torch.autograd.grad(expected, qkv, grad)
    ways = [packed_attention(*qkv, where.cu_seqlens, window)]
    for flash in (frozenset(), frozenset(FLASH_CASES)):
        monkeypatch.setattr(numerics, "_flash", flash)
        ways.append(attend(where, *qkv, window))
    if window in (None, 50):
        ways.append(cpu_flash.flash_attention(*qkv, where.cu_seqlens))
    for out in ways:
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, qkv, grad), gradients)


@pytest.mark.parametrize("value_size", [2, 6])
def test_values_may_be_of_another_size_than_keys(value_size):
    qkv, grad = inputs(4, 2, value_size=value_size)
    where = segments(torch.zeros(ROWS, LENGTH), DOCUMENTS)
    result, expected = attend(where, *qkv, 5), attend(Segments(DOCUMENTS, None), *qkv, 5)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result, qkv, grad), torch.autograd.grad(expected, qkv, grad))
    q, k, v = (x.detach().to("meta") for x in qkv)
    assert cpu_attention.PACKED_ATTENTION(q, k, v, [0, LENGTH, 2 * LENGTH], 0).shape == result.shape


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
    result, expected = attend(where, *qkv, window, sinks), _plainly(*qkv, sinks, window)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, [*qkv, sinks], grad) for out in (result, expected)))
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


@pytest.mark.parametrize(
    ("tokens", "row", "ranges"),
    [
        (254, 127, [(0, 127), (127, 254)]),
        (320, 160, [(0, 128), (128, 160), (160, 288), (288, 320)]),
        (200, 40, [(0, 120), (120, 200)]),
        (300, 300, [(0, 128), (128, 256), (256, 300)]),
    ],
)
def test_blocks_end_with_a_row_or_with_complete_short_rows(monkeypatch, tokens, row, ranges):
    monkeypatch.setattr(cpu_attention, "QUERY_BLOCK", 128)
    assert list(cpu_attention._query_ranges(tokens, row)) == ranges


def test_gradcheck():
    qkv, _ = inputs(2, 1)
    where = segments(torch.zeros(ROWS, LENGTH), DOCUMENTS)
    assert torch.autograd.gradcheck(lambda *x: attend(where, *x, 4), qkv)


def test_bfloat16_is_as_close_as_the_kernel_of_pytorch():
    qkv, _ = inputs(4, 2, torch.bfloat16)
    wide = [x.detach().double() for x in qkv]
    bounds = list(range(0, ROWS * LENGTH + 1, LENGTH))
    exact = packed_attention(*wide, bounds, None)
    ways = packed_attention(*qkv, bounds, None), cpu_flash.flash_attention(*qkv, bounds)
    q, k, v = (x.transpose(1, 2) for x in qkv)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    for ours in ways:
        assert (ours.double() - exact).abs().max() <= 1.5 * (theirs.double() - exact).abs().max()


def test_the_kernel_is_chosen_where_it_computes_the_same(monkeypatch):
    (q, _, v), _ = inputs(4, 2, torch.float32)
    bounds = [0, 4, 5, 11, 22]
    for chosen in (frozenset(), frozenset({"fp32-short"})):
        monkeypatch.setattr(numerics, "_flash", chosen)
        assert [cpu_flash.prefers_flash(q, v, bounds, window) for window in (None, 11)] == [bool(chosen)] * 2
        assert not cpu_flash.prefers_flash(q, v, bounds, 10)
        assert not cpu_flash.prefers_flash(q, v[..., :-1], bounds, None)
    monkeypatch.setattr("kumi.spec.numerics.LONG_TOKENS", 22 / 4)
    assert not cpu_flash.prefers_flash(q, v, bounds, None), "the mean length of the documents counts"


def test_heads_whose_elements_do_not_lie_side_by_side():
    qkv, grad = inputs(4, 2)
    bounds, across = [0, 4, 22], [x.detach().mT.contiguous().mT.requires_grad_() for x in qkv]
    assert across[0].stride(-1) != 1
    outs = [cpu_flash.flash_attention(*x, bounds) for x in (qkv, across)]
    torch.testing.assert_close(*outs)
    ours = torch.autograd.grad(outs[1], across, grad.mT.contiguous().mT)
    torch.testing.assert_close(ours, torch.autograd.grad(outs[0], qkv, grad))


@pytest.fixture
def threads():
    """Set the number of threads that PyTorch computes with, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("way", [partial(packed_attention, window=None), cpu_flash.flash_attention])
def test_several_threads_give_the_same_bits_each_time(threads, way):
    generator, bounds = torch.Generator().manual_seed(0), [0, 70, 140, 333]
    q, k, v = (torch.randn(1, 333, heads, 64, generator=generator, requires_grad=True) for heads in (8, 2, 2))
    threads(4)
    first, *others = (way(q, k, v, cu_seqlens=bounds) for _ in range(4))
    gradients = torch.autograd.grad(first.sum(), (q, k, v))
    for out in others:
        assert torch.equal(out, first)
        assert all(map(torch.equal, torch.autograd.grad(out.sum(), (q, k, v)), gradients))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(
    "scores", [PLAIN_SCORES, Scores(softcap=2.0, slopes=(0.1, 0.2, 0.3, 0.4)), Scores(bf16_bias=True)]
)
def test_documents_divided_among_threads_give_the_same_result(threads, window, scores):
    qkv, grad = inputs(4, 2, value_size=6)
    sinks = None if scores.slopes else torch.linspace(-2, 3, 4, dtype=torch.float64).requires_grad_()
    leaves = [*qkv] if sinks is None else [*qkv, sinks]
    bounds, results = [0, 4, 5, 11, 16, 22], []
    for count in (1, 2, 3):
        threads(count)
        assert (len(cpu_attention._document_groups(bounds, window or 0)) > 1) == (count > 1)
        out = packed_attention(*qkv, bounds, window, sinks, scores)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
        assert torch.get_num_threads() == count
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_documents_are_divided_where_all_threads_get_enough(threads):
    threads(2)
    assert cpu_attention._document_groups([0, 5, 10, 15, 20], 0) == [[0, 5], [5, 10], [10, 15], [15, 20]]
    assert cpu_attention._document_groups(list(range(0, 45, 5)), 0) == [
        [5 * n, 5 * n + 5, 5 * n + 10] for n in (0, 2, 4, 6)
    ]
    assert cpu_attention._document_groups([0, 1, 2, 20], 0) == [[0, 1, 2, 20]], "one document is most of it"
    assert cpu_attention._document_groups([0, 40, 50, 60, 70, 80], 10) == [[0, 40], [40, 50, 60], [60, 70, 80]]
    threads(1)
    assert cpu_attention._document_groups([0, 5, 10], 0) == [[0, 5, 10]]


def test_parts_run_in_threads_of_their_own_also_after_a_fork(threads):
    threads(2)
    assert run_in_threads([torch.get_num_threads] * 2) == [1, 1]
    wide = torch.ones(1, requires_grad=True)
    assert not any(out.requires_grad for out in run_in_threads([lambda: wide * 2] * 2))
    with pytest.raises(ZeroDivisionError):
        run_in_threads([lambda: 1, lambda: 1 // 0])
    child = os.fork()
    if child == 0:
        os._exit(0 if run_in_threads([lambda: 3] * 2) == [3, 3] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_operators_are_well_formed():
    qkv, _ = inputs(4, 2, torch.float32)
    torch.library.opcheck(cpu_flash.FLASH_ATTENTION, (*qkv, [0, 4, 11, 22], None))
    torch.library.opcheck(cpu_attention.PACKED_ATTENTION, (*qkv, [0, 4, 11, 22], 0))
    torch.library.opcheck(cpu_attention.PACKED_ATTENTION, (*qkv, [0, 4, 11, 22], 0, torch.randn(4, requires_grad=True)))


def test_flops_are_counted_as_those_of_sdpa():
    qkv, grad = inputs(4, 2, torch.float32)
    shape = (ROWS, 4, LENGTH, SIZE)
    for attention in (partial(packed_attention, window=None), cpu_flash.flash_attention):
        with FlopCounterMode(display=False) as forward:
            out = attention(*qkv, [0, 11, 22])
        assert forward.get_total_flops() == sdpa_flop_count(shape, shape, shape)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(out, qkv, grad)
        assert backward.get_total_flops() == sdpa_backward_flop_count(shape, shape, shape, shape)


def test_segments():
    assert segments(torch.zeros(2, 3), None).cu_seqlens == [0, 3, 6]
    assert segments(torch.zeros(ROWS, LENGTH), DOCUMENTS).cu_seqlens == [0, 4, 5, 11, 22]
    # Equal ids in neighbouring rows are still two documents.
    assert segments(torch.zeros(2, 3), torch.ones(2, 3)).cu_seqlens == [0, 3, 6]
