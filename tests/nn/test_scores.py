"""Scores that are scaled, capped or tilted by the distance: every way to compute them equals the formula, one query at
a time."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from kumi.nn.attention import chunked_attention, cpu_attention, partial_attention
from kumi.nn.attention.attention_context import Segments
from kumi.nn.attention.grouped_query import Attention, attend
from kumi.nn.attention.scores import PLAIN_SCORES, Scores, alibi_slopes
from kumi.parallel import RankInfo, build_mesh
from kumi.parallel.compiled import prepare_to_compile
from kumi.spec import model
from kumi.spec.layout import Layout
from nn.test_flash_parts import ON_CPU

ROWS, LENGTH, SIZE, VALUE_SIZE = 2, 11, 8, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2], [5] * 11])
BOUNDS = {"rows": [0, 11, 22], "documents": [0, 4, 5, 11, 22]}


def pairs(count):
    """Return the size of a block with `count` keys, in place of `key_size`."""
    return -(-count // 2) * 2


@pytest.fixture(autouse=True)
def _small_blocks():
    chunked_attention._plan.cache_clear()
    with (
        patch.object(cpu_attention, "QUERY_BLOCK", 3),
        patch.multiple(partial_attention, QUERY_BLOCKS={"cpu": 4}, key_size=pairs, QUERY_ALIGNMENT=2),
    ):
        yield
    chunked_attention._plan.cache_clear()


def inputs(heads, kv_heads, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((heads, SIZE), (kv_heads, SIZE), (kv_heads, VALUE_SIZE), (heads, VALUE_SIZE))
    *qkv, grad = (torch.randn(ROWS, LENGTH, *size, generator=generator, dtype=torch.float64) * 1.5 for size in sizes)
    return [x.to(dtype).requires_grad_() for x in qkv], grad.to(dtype)


def by_the_formula(q, k, v, ids, window, sinks, scores):
    """Attention in words, for one query of one head after the other."""
    scale = SIZE**-0.5 if scores.scale is None else scores.scale
    group, out = q.shape[2] // k.shape[2], []
    for row in range(ROWS):
        for place in range(LENGTH):
            for head in range(q.shape[2]):
                seen = [
                    key
                    for key in range(place + 1)
                    if place - key < (window or LENGTH) and (ids is None or ids[row, key] == ids[row, place])
                ]
                score = (k[row, seen, head // group] @ q[row, place, head]) * scale
                if scores.softcap is not None:
                    score = scores.softcap * torch.tanh(score / scores.softcap)
                if scores.slopes is not None and scores.bf16_bias:
                    first = 0 if ids is None else int((ids[row] == ids[row, place]).nonzero()[0])
                    steps = torch.tensor(scores.slopes[head]).bfloat16() * (torch.tensor(seen) - first).bfloat16()
                    score = score + steps.to(score.dtype) * scale
                elif scores.slopes is not None:
                    score = score - scores.slopes[head] * (place - torch.tensor(seen, dtype=score.dtype))
                if sinks is not None:
                    score = torch.cat([score, sinks[head].view(1)])
                out.append(torch.softmax(score, 0)[: len(seen)] @ v[row, seen, head // group])
    return torch.stack(out).view(ROWS, LENGTH, q.shape[2], -1)


def slopes(heads):
    return tuple(0.7 / (1 + head) for head in range(heads))


KINDS = {
    "scale": lambda heads: Scores(0.31),
    "softcap": lambda heads: Scores(None, 1.3),
    "alibi": lambda heads: Scores(None, None, slopes(heads)),
    "alibi in steps": lambda heads: Scores(0.31, None, slopes(heads), True),
    "all": lambda heads: Scores(0.5, 2.0, slopes(heads)),
}


def ways(documents):
    """The segments that lead to each way of computing."""
    ids, bounds = DOCUMENTS if documents == "documents" else None, BOUNDS[documents]
    yield Segments(ids, bounds), nullcontext()  # packed attention of CPUs
    yield Segments(ids, torch.tensor(bounds, dtype=torch.int32)), nullcontext()  # blocks, or a kernel's mask
    yield Segments(ids, torch.tensor(bounds, dtype=torch.int32)), ON_CPU  # kernels, where they compute it
    yield Segments(ids, None), nullcontext()  # unknown devices


@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("documents", BOUNDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_equals_the_formula(kind, documents, window, sunk):
    heads = (6, 2) if window is None else (2, 2)
    qkv, grad = inputs(*heads)
    scores = KINDS[kind](heads[0])
    sinks = torch.linspace(-2, 3, heads[0], dtype=torch.float64).requires_grad_() if sunk else None
    leaves = [*qkv, sinks] if sunk else qkv
    ids = DOCUMENTS if documents == "documents" else None
    expected = by_the_formula(*qkv, ids, window, sinks, scores)
    of_wanted = torch.autograd.grad(expected, leaves, grad)
    for where, how in ways(documents):
        with how:
            result = attend(where, *qkv, window, sinks, scores)
            of_found = torch.autograd.grad(result, leaves, grad)
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-12)
        for actual, other in zip(of_found, of_wanted, strict=True):
            torch.testing.assert_close(actual, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_random_cases(seed):
    random = Random(seed)
    kv_heads = random.choice((1, 2, 3))
    heads, window = kv_heads * random.choice((1, 2, 4)), random.choice((None, 1, 3, 7))
    scores = Scores(
        random.choice((None, 0.1, 1.0)),
        random.choice((None, 0.5, 3.0)),
        random.choice((None, slopes(heads))),
        random.random() < 0.3,
    )
    ids = torch.tensor([[random.random() < 0.3 for _ in range(LENGTH)] for _ in range(ROWS)]).cumsum(1)
    begins = torch.cat([torch.ones(ROWS, 1, dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1).flatten().nonzero()[:, 0]
    bounds = [*begins.tolist(), ROWS * LENGTH]
    qkv, grad = inputs(heads, kv_heads, seed)
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True) if random.random() < 0.5 else None
    leaves = qkv if sinks is None else [*qkv, sinks]
    expected = by_the_formula(*qkv, ids, window, sinks, scores)
    of_wanted = torch.autograd.grad(expected, leaves, grad)
    for where in (Segments(ids, bounds), Segments(ids, torch.tensor(bounds, dtype=torch.int32))):
        result = attend(where, *qkv, window, sinks, scores)
        for actual, other in zip(
            (result, *torch.autograd.grad(result, leaves, grad)), (expected, *of_wanted), strict=True
        ):
            torch.testing.assert_close(actual, other, rtol=1e-11, atol=1e-12)


def test_what_is_plain_is_plain():
    qkv, _ = inputs(4, 2)
    for where, _ in ways("documents"):
        expected = attend(where, *qkv, 5)
        for same in (PLAIN_SCORES, Scores(SIZE**-0.5), Scores(None, 1e6), Scores(None, None, (0.0,) * 4)):
            torch.testing.assert_close(attend(where, *qkv, 5, None, same), expected, rtol=1e-9, atol=1e-9)


def test_a_bias_by_the_position_of_the_key_is_one_by_the_distance():
    """As in transformers' BLOOM: a bias that is equal for all keys of a query does not matter."""
    qkv, _ = inputs(2, 2)
    place, steep = torch.arange(LENGTH), torch.tensor(slopes(2), dtype=torch.float64)
    q, k, v = qkv
    raw = torch.einsum("bshe,bthe->bhst", q, k) * SIZE**-0.5 + (steep[:, None] * place)[:, None]
    weights = torch.softmax(raw.masked_fill(place[:, None] < place, -torch.inf), -1)
    expected = torch.einsum("bhst,bthe->bshe", weights, v)
    result = attend(Segments(None, BOUNDS["rows"]), *qkv, None, None, Scores(None, None, slopes(2)))
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_dtypes(kind, dtype):
    qkv, grad = inputs(4, 2, dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    scores, tolerance = KINDS[kind](4), 1e-5 if dtype == torch.float32 else 5e-2
    exact = by_the_formula(*wide, DOCUMENTS, 6, None, scores)
    of_exact = torch.autograd.grad(exact, wide, grad.double())
    for where, _ in list(ways("documents"))[:2]:
        result = attend(where, *qkv, 6, None, scores)
        assert result.dtype == dtype
        assert (result.double() - exact).abs().max() < tolerance * exact.abs().max()
        for actual, other in zip(torch.autograd.grad(result, qkv, grad), of_exact, strict=True):
            assert actual.dtype == dtype
            assert (actual.double() - other).abs().max() < tolerance * other.abs().max()


def test_the_operators_are_well_formed():
    qkv, _ = inputs(4, 2, dtype=torch.float32)
    sinks = torch.randn(4, requires_grad=True)
    for operator in (cpu_attention.PACKED_ATTENTION, chunked_attention.CHUNKED_ATTENTION):
        torch.library.opcheck(operator, (*qkv, [0, 4, 11, 22], 3, None, None, 1.5, slopes(4), True))
        torch.library.opcheck(operator, (*qkv, [0, 4, 11, 22], 0, sinks, 0.3, None, None))


def test_nothing_is_kept_but_ends_and_sums():
    qkv, _ = inputs(4, 2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        chunked_attention.chunked_attention(*qkv, BOUNDS["rows"], None, None, Scores(None, 1.5))
    # Queries, keys, values, the result and the log-sum-exps.
    assert sum(saved) == sum(x.numel() for x in qkv) + qkv[0].numel() + ROWS * LENGTH * 4


def test_flops_of_blocks_are_counted_as_those_of_sdpa():
    qkv, grad = inputs(4, 2, dtype=torch.float32)
    shape = (ROWS, 4, LENGTH, SIZE)
    with FlopCounterMode(display=False) as forward:
        out = chunked_attention.chunked_attention(*qkv, BOUNDS["rows"], None)
    assert forward.get_total_flops() == sdpa_flop_count(shape, shape, shape)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, qkv, grad)
    assert backward.get_total_flops() == sdpa_backward_flop_count(shape, shape, shape, shape)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 40, 112])
def test_slopes_are_those_of_bloom(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    alibi = build_alibi_tensor(torch.ones(1, 3, dtype=torch.int64), heads, torch.float32)
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), alibi[:, 0, 1], rtol=1e-6, atol=0)


def test_the_part_of_a_rank():
    whole = Scores(0.5, 2.0, slopes(6))
    assert [whole.part(index, 3).slopes for index in range(3)] == [slopes(6)[:2], slopes(6)[2:4], slopes(6)[4:]]
    assert whole.part(1, 3)[:2] == (0.5, 2.0)
    assert Scores(0.5, 2.0).part(1, 3) == Scores(0.5, 2.0)


def test_blocks_are_left_out_of_compiled_layers():
    plain, capped = (model.Attention(4, 2, 8, None, softcap=cap) for cap in (None, 2.0))
    parts = [Attention(16, spec, 1e-5, device=torch.device("meta"), dtype=torch.float32) for spec in (plain, capped)]
    prepare_to_compile(torch.nn.ModuleList(parts), build_mesh(Layout(), RankInfo(0, 1, 0, torch.device("cpu"))))
    assert [len(part.wrappers) for part in parts] == [0, 1]
