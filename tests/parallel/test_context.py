"""Ranks that share sequences train as one process does, however attention looks beyond a rank's part."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grids import sampled
from kumi.nn.attention.attention_context import Segments
from kumi.nn.attention.grouped_query import attend
from kumi.nn.attention.scores import PLAIN_SCORES, Scores
from kumi.parallel.context_parallel import context_parallel_attention, shard_sequence, unsharded_sequences
from kumi.parallel.ring_attention import positions_of_rank
from kumi.parallel.ulysses import to_rank_order, to_sequence_order
from kumi.spec.layout import Layout
from nn.test_flash_parts import ON_CPU
from ranks import run_ranks
from steps import Part, Trace, mesh_of, train

TOLERANCE = 1e-10
ROWS, LENGTH = 2, 24
DOCUMENTS = torch.stack(
    [(torch.arange(LENGTH) >= 5).int() + (torch.arange(LENGTH) >= 14).int(), torch.zeros(LENGTH, dtype=torch.int32)]
)


def _attended(layout, heads, v_size, documents, window, *score, scores=PLAIN_SCORES):
    """Return the largest errors of result and gradients of a rank's positions, compared to unsharded rows."""
    random, mesh = torch.Generator().manual_seed(0), mesh_of(layout)
    shapes = [(heads[0], 6), (heads[1], 6), (heads[1], v_size), (heads[0], v_size)]
    *qkv, grad = (torch.randn(ROWS, LENGTH, *one, generator=random, dtype=torch.float64) for one in shapes)
    ids = DOCUMENTS if documents else None
    mine = positions_of_rank(LENGTH, layout.cp, mesh.index("cp"))
    parts = [x[:, mine].requires_grad_() for x in qkv]
    sinks = [torch.linspace(*score, heads[0], dtype=torch.float64).requires_grad_()] if score else []
    how = (sinks[0] if sinks else None), scores
    whole = attend(Segments(ids, None), *(x.requires_grad_() for x in qkv), window, *how)
    out = context_parallel_attention(mesh)(torch.zeros(ROWS, len(mine)), ids)(*parts, window, *how)
    expected = [whole, *torch.autograd.grad(whole, [*qkv, *sinks], grad)]
    actual = [out, *torch.autograd.grad(out, [*parts, *sinks], grad[:, mine])]
    for sink_grad in actual[4:]:  # every rank has its own tokens' part
        dist.all_reduce(sink_grad)
    expected = [*(x[:, mine] for x in expected[:4]), *expected[4:]]
    return max(float((a - b).detach().abs().max()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("cp", "heads", "v_size", "documents", "window"),
    [
        (2, (4, 2), 6, False, None),
        (2, (4, 2), 10, True, None),
        (2, (4, 1), 6, True, 5),
        (3, (6, 3), 6, True, None),
        (4, (4, 2), 6, True, None),
        (4, (8, 1), 6, True, 7),
    ],
)
@pytest.mark.parametrize("how", ["ring", "ulysses"])
def test_attention_equals_that_of_whole_rows(ranks, how, cp, heads, v_size, documents, window):
    layout = Layout(cp=cp, context=how)
    assert max(ranks(cp, _attended, layout, heads, v_size, documents, window)) < 1e-12


@pytest.mark.parametrize("how", ["ring", "ulysses"])
@pytest.mark.parametrize(("cp", "heads", "window"), [(2, (4, 2), 5), (4, (4, 2), None)])
def test_sinks_are_those_of_whole_rows(ranks, how, cp, heads, window):
    assert max(ranks(cp, _attended, Layout(cp=cp, context=how), heads, 6, True, window, -2.0, 3.0)) < 1e-12


def _with_scores(layout, scores, window, sinks):
    """On a rank: as `_attended`, of documents whose scores are not plain."""
    errors = [_attended(layout, (4, 2), 6, documents, window, *sinks, scores=scores) for documents in (False, True)]
    with ON_CPU:  # which do not compute them, or do
        return max(*errors, _attended(layout, (4, 2), 6, True, window, *sinks, scores=scores))


SLOPES = (0.7, 0.3, 0.5, 0.01)
SCORES = {
    "scale": (Scores(0.31), None, ()),
    "softcap": (Scores(None, 1.3), 5, ()),
    "alibi": (Scores(None, None, SLOPES), None, ()),
    "alibi in steps": (Scores(0.31, None, SLOPES, True), 7, ()),
    "alibi, window, sinks": (Scores(None, None, SLOPES), 7, (-2.0, 3.0)),
    "all": (Scores(0.5, 2.0, SLOPES), 5, (-2.0, 3.0)),
}


@pytest.mark.parametrize("how", ["ring", "ulysses"])
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_whole_rows(ranks, how, name):
    cp = 4 if name == "all" else 2
    assert max(ranks(cp, _with_scores, Layout(cp=cp, context=how), *SCORES[name])) < 1e-12


def _attended_by_kernels(*args):
    with ON_CPU:
        return _attended(*args)


@pytest.mark.parametrize("documents", [False, True])
def test_sinks_where_a_device_has_fused_kernels(ranks, documents):
    assert max(ranks(2, _attended_by_kernels, RING, (4, 2), 6, documents, None, -2.0, 3.0)) < 1e-12


@cache
def _alone(family: str) -> Trace:
    return run_ranks(1, train, Layout(), family, 1)[0]


def _close(part: Part, whole: Part) -> bool:
    sizes = zip(part.start, part.values.shape, strict=True)
    expected = whole.values[tuple(slice(first, first + size) for first, size in sizes)]
    return bool(np.all(np.abs(part.values - expected) <= TOLERANCE * np.abs(whole.values).max()))


RING, ULYSSES = Layout(cp=2), Layout(cp=2, context="ulysses")
CASES = [
    *((replace(RING, recompute=how), "qwen", 3) for how in ("selective", "full")),
    (replace(RING, zero=1), "llama", 1),
    (replace(ULYSSES, zero=3), "qwen", 3),
    (Layout(cp=4), "qwen", 1),
    (Layout(cp=4, zero=2, context="ulysses"), "qwen", 3),
    (replace(RING, dp_replicate=2), "qwen", 3),
]
# Others here and in test_model_layouts cover these.
LATER = [
    (replace(ULYSSES, recompute="selective"), "llama", 3),
    (replace(RING, dp_shard=2, zero=1), "qwen", 3),
    (RING, "qwen", 3),
    (ULYSSES, "llama", 3),
    (replace(ULYSSES, recompute="full"), "llama", 3),
    (replace(RING, dp_shard=2, zero=3, recompute="selective"), "llama", 3),
    (replace(RING, dp_replicate=2, zero=3), "llama", 3),
]


@pytest.mark.parametrize(
    ("layout", "family", "microbatches"), sampled([*CASES, *LATER], lambda place: place < len(CASES))
)
def test_training_equals_one_process(ranks, layout, family, microbatches):
    expected = _alone(family)
    for trace in ranks(layout.world_size, train, layout, family, microbatches):
        assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert trace.norms == pytest.approx(expected.norms, rel=TOLERANCE)
        for mine, whole in zip([*trace.grads, trace.params], [*expected.grads, expected.params], strict=True):
            by_name = {part.name: part for part in whole}
            assert [part.name for part in mine if not _close(part, by_name[part.name])] == []


def _cut():
    mesh = mesh_of(Layout(cp=2))
    ids = torch.arange(16).view(2, 8)
    shard = shard_sequence({"input_ids": ids, "document_ids": (ids % 8 >= 3).int()}, mesh)
    return {name: value.tolist() for name, value in shard.items()}


def test_the_cut(ranks):
    first, second = ranks(2, _cut)
    assert (first["input_ids"], second["input_ids"]) == (
        [[0, 1, 6, 7], [8, 9, 14, 15]],
        [[2, 3, 4, 5], [10, 11, 12, 13]],
    )
    # Positions count from the beginning of the document, wherever that lies.
    assert (first["position_ids"], second["position_ids"]) == ([[0, 1, 3, 4]] * 2, [[2, 0, 1, 2]] * 2)
    assert first["document_ids"] == second["document_ids"] == [[0, 0, 0, 1, 1, 1, 1, 1]] * 2


def test_pieces_are_put_in_order():
    for cp in (1, 2, 3):
        pieces = torch.stack([positions_of_rank(12, cp, index) for index in range(cp)])[:, None, :, None]
        assert torch.equal(to_sequence_order(pieces).flatten(), torch.arange(12))
        assert torch.equal(to_rank_order(to_sequence_order(pieces), cp), pieces)


def _whole(layout):
    from kumi.parallel import build
    from kumi.spec.precision import PRECISIONS
    from steps import SPECS

    model = build(SPECS["llama"], mesh_of(layout), PRECISIONS["fp64"], weights=7)
    with torch.no_grad(), unsharded_sequences(model):
        return model(torch.arange(12).view(2, 6)).tolist()


def test_a_rank_can_take_whole_sequences(ranks):
    expected = ranks(1, _whole, Layout())[0]
    for layout in (Layout(cp=2), Layout(cp=2, zero=3)):
        for actual in ranks(2, _whole, layout):
            np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
