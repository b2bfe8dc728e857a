"""Log-probs of requests: packed into rows, on every layout, they are those of each request alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kumi.errors import ConfigError
from kumi.evaluation.evaluated_model import EvaluatedModel, lead
from kumi.evaluation.score_requests import ROW_TOKENS, Request, pack_requests, shorten
from kumi.inference.sampling import Sampling
from kumi.nn.attention.shared_prefix import Branch, find_branches, supports_branches
from kumi.nn.decoder import Decoder
from kumi.parallel.build import build
from kumi.parallel.mesh import Mesh, RankInfo
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from ranks import RankError, run_ranks
from steps import SPECS, VOCAB, mesh_of
from weights import init_weights

MAX_LENGTH = 24


def _requests(count: int, seed: int = 0, longest: int = 12) -> list[Request]:
    draw = random.Random(seed)

    def tokens() -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, longest)))

    requests = [Request(tokens(), tokens()) for _ in range(count)]
    return [*requests, requests[0]]


def _alone(decoder: Decoder, request: Request) -> tuple[float, bool]:
    """The score of `request` in a row without other tokens, from the logits."""
    ids = torch.tensor([[*request.context, *request.continuation]])
    with torch.no_grad():
        logits = decoder(ids[:, :-1])[0, len(request.context) - 1 :].double()
    labels = torch.tensor(request.continuation)
    log_probs = logits.log_softmax(-1).gather(-1, labels[:, None])
    return log_probs.sum().item(), bool((logits.argmax(-1) == labels).all())


@pytest.fixture(scope="module")
def single():
    return Mesh(Layout(), RankInfo(0, 1, 0, torch.device("cpu")), {})


@pytest.mark.parametrize("family", ["qwen", "hybrid", "scores"])
def test_packed_scores_are_those_of_each_request_alone(family, single):
    decoder = Decoder(SPECS[family], dtype=torch.float64)
    init_weights(decoder, SPECS[family], 3)
    requests = _requests(20)
    # The greedy reply of a context, so that some scores are greedy.
    for request in requests[:5]:
        with torch.no_grad():
            requests.append(Request(request.context, (int(decoder(torch.tensor([request.context]))[0, -1].argmax()),)))
    scores = EvaluatedModel(decoder, single, max_length=MAX_LENGTH, tokens=60).score(requests)
    alone = [_alone(decoder, request) for request in requests]
    assert [score.log_prob for score in scores] == pytest.approx([score for score, _ in alone], rel=1e-12)
    assert [score.greedy for score in scores] == [greedy for _, greedy in alone]
    assert any(score.greedy for score in scores)
    assert not all(score.greedy for score in scores)


def _choices(questions: int, seed: int = 0) -> list[Request]:
    """Questions with four choices each, in an order in which those of one do not stand together."""
    draw = random.Random(seed)
    contexts = [tuple(draw.randrange(VOCAB) for _ in range(draw.randint(2, 16))) for _ in range(questions)]
    choices = [tuple(draw.randrange(VOCAB) for _ in range(draw.randint(1, 5))) for _ in range(4 * questions)]
    return [Request(contexts[number % questions], choice) for number, choice in enumerate(choices)]


@pytest.mark.parametrize("family", ["qwen", "latent", "sinks", "gemma", "gpt", "moe", "hybrid", "scores"])
def test_a_shared_context_changes_no_score(family, single):
    """Full attention, windows, latents, capped scores, sinks, learned positions; the last two do not share."""
    decoder = Decoder(SPECS[family], dtype=torch.float64)
    init_weights(decoder, SPECS[family], 3)
    requests = [request for request in _choices(9) if family != "gpt" or sum(map(len, request)) <= 16]
    alone = [_alone(decoder, request) for request in requests]
    model = EvaluatedModel(decoder, single, max_length=MAX_LENGTH, tokens=60)
    assert model.shares_contexts == (family not in ("hybrid", "scores"))
    scores = model.score(requests)
    assert [score.log_prob for score in scores] == pytest.approx([score for score, _ in alone], rel=1e-10)
    assert [score.greedy for score in scores] == [greedy for _, greedy in alone]


def test_alibi_counts_the_positions_of_the_shared_context(single):
    layers = [layer for layer in SPECS["scores"].layers if layer.attention.rope is None]
    spec = replace(SPECS["scores"], layers=tuple(layers))
    assert supports_branches(spec)
    decoder = Decoder(spec, dtype=torch.float64)
    init_weights(decoder, spec, 3)
    requests = _choices(5)
    scores = EvaluatedModel(decoder, single, max_length=MAX_LENGTH, tokens=60).score(requests)
    expected = [_alone(decoder, request)[0] for request in requests]
    assert [score.log_prob for score in scores] == pytest.approx(expected, rel=1e-10)


def test_a_shared_context_is_in_its_row_once():
    """Context 200 tokens, 4 choices of 10: 239 positions in place of 836."""
    requests = [Request(tuple(range(200)), tuple(range(start, start + 10))) for start in (300, 400, 500, 600)]
    (batch,) = pack_requests(requests, tokens=2048, share=True)
    assert batch.columns["input_ids"].shape == (1, 239)
    assert (batch.columns["labels"] >= 0).sum() == 40
    (apart,) = pack_requests(requests, tokens=2048)
    assert apart.columns["input_ids"].shape == (1, 4 * 209)
    positions, documents = (torch.from_numpy(batch.columns[name]) for name in ("position_ids", "document_ids"))
    starts = range(199, 239, 10)
    assert find_branches(positions, documents) == [Branch(0, 0, 199, start, start + 10) for start in starts]
    many = [Request(tuple(range(200)), (number,) * 10) for number in range(300)]
    rows = [batch.columns["input_ids"].shape[1] for batch in pack_requests(many, tokens=4096, share=True)]
    assert max(rows) <= ROW_TOKENS


def _score_on(layout: Layout, family: str) -> list[list[tuple[float, bool]]] | None:
    mesh = mesh_of(layout)
    module = build(SPECS[family], mesh, PRECISIONS["fp64"], weights=7)
    model = EvaluatedModel(module, mesh, max_length=MAX_LENGTH, tokens=40)
    # Fewer requests than ranks, none, and many: several units of work.
    sets = [_requests(1), [], _requests(25, seed=1), _choices(7)]
    return lead(model, lambda model: [model.score(requests) for requests in sets])


LAYOUTS = [
    (Layout(dp_replicate=2), "qwen"),
    (Layout(dp_shard=2, zero=3), "qwen"),
    (Layout(tp=2), "qwen"),
    (Layout(tp=2, sequence_parallel=False), "qwen"),
    (Layout(pp=2), "qwen"),
    (Layout(cp=2), "qwen"),
    (Layout(cp=2, context="ulysses"), "qwen"),
    (Layout(dp_shard=2, ep=2, zero=2), "moe"),
    (Layout(tp=2), "hybrid"),
    pytest.param(Layout(pp=2, schedule="zb-v", stages=2), "deep-tied", marks=pytest.mark.exhaustive),
    pytest.param(Layout(pp=2, tp=2), "qwen", marks=pytest.mark.exhaustive),
    pytest.param(Layout(dp_shard=2, cp=2, zero=3), "qwen", marks=pytest.mark.exhaustive),
    pytest.param(Layout(dp_replicate=2, dp_shard=2, zero=1), "qwen", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("layout", "family"), LAYOUTS)
def test_every_layout_scores_as_one_process(layout, family):
    expected = run_ranks(1, _score_on, Layout(), family)[0]
    results = run_ranks(layout.world_size, _score_on, layout, family)
    assert results[1:] == [None] * (layout.world_size - 1)
    for scores, reference in zip(results[0], expected, strict=True):
        assert [score for score, _ in scores] == pytest.approx([score for score, _ in reference], rel=1e-12)
        assert [greedy for _, greedy in scores] == [greedy for _, greedy in reference]


def _fail_on(layout: Layout) -> None:
    mesh = mesh_of(layout)
    model = EvaluatedModel(
        build(SPECS["qwen"], mesh, PRECISIONS["fp64"], weights=7), mesh, max_length=MAX_LENGTH, tokens=40
    )

    def work(model: EvaluatedModel) -> None:
        model.score(_requests(3))
        raise ValueError("a task fails")

    lead(model, work)


def test_other_ranks_end_when_the_work_fails():
    """They get a message, instead of waiting for a unit."""
    with pytest.raises(RankError, match="a task fails"):
        run_ranks(2, _fail_on, Layout(dp_replicate=2), timeout=20)


def test_scores_are_recorded_as_they_come(single):
    decoder = Decoder(SPECS["llama"], dtype=torch.float64)
    init_weights(decoder, SPECS["llama"], 3)
    requests, records = _requests(20), []
    model = EvaluatedModel(decoder, single, max_length=MAX_LENGTH, tokens=60)
    scores = model.score(requests, lambda numbers, values: records.append(dict(zip(numbers, values, strict=True))))
    assert len(records) > 2
    merged = {number: score for record in records for number, score in record.items()}
    assert [merged[number] for number in range(len(requests))] == scores


def test_long_contexts_lose_their_first_tokens(single):
    long = Request(tuple(range(40)), (5, 6))
    assert shorten(long, 10) == Request(tuple(range(31, 40)), (5, 6))
    assert shorten(long, 41) == long
    decoder = Decoder(SPECS["llama"], dtype=torch.float64)
    init_weights(decoder, SPECS["llama"], 3)
    model = EvaluatedModel(decoder, single, max_length=10)
    cut, _ = model.score([long, Request((1,), (2,))])
    assert cut.log_prob == pytest.approx(_alone(decoder, shorten(long, 10))[0], rel=1e-12)
    assert model.shortened == 1
    with pytest.raises(ConfigError, match=r"11 tokens .* at most 10"):
        shorten(Request((1,), tuple(range(11))), 10)


def test_rows_are_full_and_each_request_is_in_one_of_them():
    requests = [Request(tuple(range(1, 1 + length)), (9,)) for length in (100, 300, 500, 700, 5, 2000, 60)]
    batches = list(pack_requests(requests, tokens=4096, ranks=2, multiple=16))
    assert sorted(span.request for batch in batches for span in batch.spans) == list(range(len(requests)))
    shapes = [batch.columns["input_ids"].shape for batch in batches]
    assert all(rows % 2 == 0 and length % 16 == 0 and rows * length <= 2 * 4096 for rows, length in shapes)
    labels = sum((batch.columns["labels"] >= 0).sum() for batch in batches)
    assert labels == len(requests)
    short = [Request((1,) * 100, (2,))] * 200
    packed = list(pack_requests(short, tokens=8 * ROW_TOKENS))
    used = sum((batch.columns["input_ids"] != 0).sum() for batch in packed)
    assert used / sum(batch.columns["input_ids"].size for batch in packed) > 0.9


def _generate_on(layout: Layout) -> list[list[int]] | None:
    mesh = mesh_of(layout)
    model = EvaluatedModel(build(SPECS["qwen"], mesh, PRECISIONS["fp64"], weights=7), mesh, max_length=MAX_LENGTH)
    prompts = [request.context for request in _requests(5)]
    sampling = Sampling(max_new_tokens=6, temperature=0.0)
    return lead(model, lambda model: [reply.ids for reply in model.generate(prompts, sampling)])


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_shard=2, zero=3), Layout(tp=2)])
def test_every_layout_replies_as_one_process(layout):
    """Replies are in the order of prompts, also where data-parallel ranks divide them."""
    expected = run_ranks(1, _generate_on, Layout())[0]
    assert len({tuple(reply) for reply in expected}) > 1
    assert run_ranks(2, _generate_on, layout) == [expected, None]
