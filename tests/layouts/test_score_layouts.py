"""Reward models in every layout have the results of one process, as in test_layouts: a loss of scores, in float64.

The score head has one row, which ZeRO gives to one rank and tp to all of them, each with its own tokens under sequence
parallelism; only the last stage of a pipeline has it.
"""

from __future__ import annotations

import pytest
from test_layouts import alone, equal

from grids import named, sampled
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from kumi.spec.sharding import state_bytes
from steps import OPTIM, spec_of, train

# (layout, model, microbatches a rank has in a step)
OFTEN = [
    (Layout(dp_replicate=2), "qwen-score", 3),
    (Layout(dp_shard=2, zero=3, recompute="full"), "llama-score", 1),
    (Layout(tp=2, sequence_parallel=False), "qwen-score", 2),
    (Layout(tp=2, recompute="selective"), "gemma-score", 2),
    (Layout(cp=2), "llama-score", 2),
    (Layout(pp=2, schedule="zb-h1"), "qwen-score", 4),
    (Layout(dp_shard=2, tp=2, zero=1, ep=2), "moe-score", 2),
    (Layout(pp=2, tp=2, schedule="zb-v", stages=2), "deep-tied-score", 4),
    (Layout(dp_shard=2, cp=2, zero=2), "llama-score", 3),
]
LATER = [
    (Layout(dp_shard=2, zero=1), "qwen-score", 3),
    (Layout(dp_shard=2, zero=2), "llama-score", 3),
    (Layout(dp_shard=4, zero=3, ep=4), "moe-score", 1),
    (Layout(cp=2, context="ulysses"), "qwen-score", 2),
    (Layout(cp=2, tp=2), "llama-score", 2),
    (Layout(tp=4), "gemma-score", 1),
    (Layout(tp=2, expert_tp=2), "biased-moe-score", 2),
    (Layout(pp=2), "latent-score", 3),
    (Layout(pp=2, schedule="gpipe"), "deep-tied-score", 4),
    (Layout(pp=2, schedule="interleaved", stages=3), "deep-score", 4),
    (Layout(pp=2, schedule="zb-h2"), "deep-tied-score", 4),
    (Layout(pp=2, schedule="dualpipe", stages=2), "deep-tied-score", 6),
    (Layout(pp=2, dp_shard=2, zero=3, schedule="zb-h1"), "qwen-score", 3),
    (Layout(pp=2, cp=2, dp_shard=2, zero=1), "deep-score", 3),
    (Layout(pp=2, tp=2, dp_replicate=2), "deep-tied-score", 3),
    (Layout(dp_replicate=2, dp_shard=2, tp=2, zero=3), "qwen-score", 3),
    (Layout(dp_shard=2, tp=2, pp=2, zero=1, ep=2, expert_tp=2), "moe-score", 3),
    (Layout(pp=2), "hybrid-score", 3),
]
EVERY = sorted([*OFTEN, *LATER], key=lambda case: case[0].world_size)
CASES = sampled(
    EVERY,
    lambda place: EVERY[place] in OFTEN,
    lambda layout, family, count: f"{layout.world_size}-{family}-{count}-{named(layout)}",
)


@pytest.mark.parametrize(("layout", "family", "microbatches"), CASES)
def test_scores_of_a_layout_equal_those_of_one_process(ranks, layout, family, microbatches):
    expected, spec = alone(family), spec_of(family)
    assert any(part.name == "score.weight" for part in expected.params)
    for rank, trace in enumerate(ranks(layout.world_size, train, layout, family, microbatches)):
        equal(trace, expected)
        planned = state_bytes(spec, layout, rank, PRECISIONS["fp64"], OPTIM)
        assert trace.state_bytes == (planned.params, planned.grads, planned.optimizer)
