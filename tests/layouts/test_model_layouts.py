"""Every axis alone, every pair of axes, and many combinations of three and four have the results of one process.

As in test_layouts: losses, gradient norms, gradients, and parameters after two AdamW steps, in float64; and the bytes
of the states that every rank holds are those of `kumi.spec.sharding`.
"""

from __future__ import annotations

import pytest
from test_layouts import alone, equal

from grids import named, sampled
from kumi.spec.layout import Layout
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.sharding import state_bytes
from steps import SPECS, train

# (layout, model, microbatches a rank has in a step)
ALONE = [
    (Layout(tp=2, sequence_parallel=False), "latent-dense", 2),  # parts of queries and keys that all ranks share
    (Layout(cp=2), "sinks", 2),
    (Layout(dp_shard=2, zero=3, ep=2, recompute="selective"), "hybrid", 1),
    (Layout(cp=2), "scores", 2),
    (Layout(pp=2, schedule="interleaved", stages=3), "deep-tied", 4),
    (Layout(pp=2), "latent", 3),
    (Layout(dp_shard=2, zero=1, ep=2), "moe", 3),
    (Layout(dp_shard=4, zero=3, ep=4), "latent", 1),
    (Layout(tp=2, sequence_parallel=False), "gpt", 1),
    (Layout(cp=2), "gpt", 2),
    (Layout(dp_shard=2, zero=3), "gpt", 3),
    # More ranks than key-value heads, and a vocabulary that they do not divide: padding is no logit, not capped to one.
    (Layout(tp=4), "gemma", 1),
    (Layout(dp_shard=2, zero=3, recompute="selective"), "gemma", 3),
    (Layout(tp=2, expert_tp=2, recompute="selective"), "biased-moe", 2),
    (Layout(pp=2, schedule="zb-h1"), "biased-moe", 4),
]
PAIRS = [
    (Layout(tp=2, dp_replicate=2), "qwen", 2),
    (Layout(tp=2, dp_shard=2, zero=2), "llama", 3),
    (Layout(tp=2, dp_shard=2, zero=3, sequence_parallel=False, recompute="full"), "qwen", 2),
    (Layout(tp=2, cp=2, zero=3), "latent", 1),
    (Layout(tp=2, pp=2, schedule="zb-v", stages=2), "deep-tied", 4),
    (Layout(tp=2, pp=2, schedule="interleaved", stages=2, recompute="full"), "deep", 4),
    (Layout(tp=2, pp=2, recompute="full"), "scores", 3),
    (Layout(tp=2, cp=2, context="ulysses", recompute="selective"), "scores", 2),
    (Layout(tp=2, pp=2), "hybrid", 3),
    (Layout(tp=2, dp_shard=2, zero=3, recompute="full"), "hybrid", 1),
    (Layout(cp=2, dp_shard=2, zero=3), "qwen", 3),
    (Layout(cp=2, pp=2), "qwen", 3),
    (Layout(cp=2, ep=2), "moe", 2),
    (Layout(pp=2, dp_shard=2, zero=3, schedule="zb-h1"), "qwen", 3),
    (Layout(dp_replicate=2, dp_shard=2, zero=3, ep=2), "moe", 3),
    (Layout(dp_shard=4, zero=2, ep=2), "moe", 3),
    (Layout(tp=2, pp=2), "gpt", 3),
    (Layout(tp=2, pp=2), "gemma", 3),
    (Layout(tp=4, ep=2, expert_tp=2), "biased-moe", 1),
    (Layout(dp_shard=4, zero=3, ep=2), "biased-moe", 1),
]
MORE = [(Layout(dp_shard=2, tp=2, pp=2, zero=1, ep=2, expert_tp=2), "moe", 3)]
# Of these the ones on up to four ranks repeat what others show: test_faults and parallel/test_pipeline and test_context
# train the same layouts, and the lists above have each family in each dimension or in pairs with it. The first ten are
# part of a larger layout above: tp and cp of "latent" and "scores", schedules of "biased-moe", pp beside tp and ep.
LATER = [
    (Layout(tp=2), "llama", 3),
    (Layout(tp=2, sequence_parallel=False), "qwen", 2),
    (Layout(tp=4), "qwen", 1),  # more ranks than key-value heads, and a vocabulary that they do not divide
    (Layout(pp=2, schedule="zb-h1"), "hybrid", 4),
    (Layout(tp=2, dp_shard=2, zero=3), "latent", 2),
    (Layout(tp=2, cp=2), "qwen", 2),
    (Layout(tp=2, pp=2), "deep-tied", 3),
    (Layout(pp=2, dp_shard=2, zero=1, ep=2), "moe", 3),
    (Layout(tp=2, pp=2, dp_shard=2, zero=3, schedule="zb-v", stages=2), "deep-tied", 3),
    (Layout(dp_shard=2, tp=2, cp=2, zero=3, ep=4), "latent", 2),
    (Layout(tp=4, sequence_parallel=False), "llama", 3),
    (Layout(tp=2), "latent", 2),
    (Layout(tp=2), "moe", 2),
    (Layout(cp=2), "qwen", 2),
    (Layout(cp=4), "llama", 1),
    (Layout(cp=2, context="ulysses"), "qwen", 2),
    (Layout(cp=4, context="ulysses"), "llama", 1),
    (Layout(cp=2), "latent", 2),
    (Layout(tp=2), "sinks", 2),
    (Layout(tp=4), "sinks", 1),
    (Layout(tp=2), "hybrid", 2),
    (Layout(cp=2, context="ulysses"), "sinks", 1),
    (Layout(tp=4), "scores", 1),
    (Layout(pp=2), "deep", 3),
    (Layout(pp=4), "deep-tied", 6),
    (Layout(pp=4), "deep", 1),  # as many stages work in turn
    (Layout(pp=4), "deep-tied", 2),  # fewer microbatches than stages
    (Layout(pp=2, schedule="gpipe"), "deep-tied", 4),
    (Layout(pp=2, schedule="zb-h1"), "deep", 4),
    (Layout(pp=2, schedule="zb-h2"), "deep-tied", 4),
    (Layout(pp=4, schedule="zb-v", stages=2), "deep-tied", 4),
    (Layout(pp=2, schedule="dualpipe", stages=2), "deep-tied", 6),
    (Layout(pp=2, stage_layers=(5, 2)), "deep", 3),
    (Layout(tp=2), "gpt", 2),
    (Layout(tp=2), "gemma", 2),
    (Layout(cp=2), "gemma", 2),
    (Layout(dp_shard=2, zero=1, ep=2), "biased-moe", 3),
    (Layout(tp=2, dp_shard=2, zero=1), "qwen", 2),
    (Layout(tp=2, cp=2, context="ulysses", recompute="selective"), "llama", 2),
    (Layout(tp=2, pp=2, sequence_parallel=False), "deep", 3),
    (Layout(tp=2, ep=2), "latent", 2),
    (Layout(tp=2, expert_tp=2), "moe", 2),
    (Layout(tp=4, ep=2, expert_tp=2), "moe", 1),
    (Layout(tp=2, pp=2), "sinks", 3),
    (Layout(cp=2, dp_replicate=2), "qwen", 3),
    (Layout(cp=2, dp_shard=2, zero=1), "llama", 2),
    (Layout(cp=2, pp=2, schedule="zb-h1"), "deep", 4),
    (Layout(pp=2, dp_replicate=2), "deep-tied", 3),
    (Layout(pp=2, dp_shard=2, zero=1), "deep-tied", 3),
    (Layout(pp=2, dp_shard=2, zero=3), "deep", 3),
    (Layout(pp=2, dp_shard=2, zero=1, schedule="dualpipe", stages=2), "deep-tied", 6),
    (Layout(dp_replicate=2, ep=1), "moe", 3),
    (Layout(tp=2, pp=2, schedule="zb-h1", recompute="selective"), "gpt", 3),
    (Layout(tp=2, pp=2, dp_shard=2, zero=1, schedule="interleaved", stages=2, recompute="selective"), "deep-tied", 2),
    (Layout(cp=2, pp=2, dp_shard=2, zero=1), "deep-tied", 3),
    (Layout(dp_replicate=2, dp_shard=2, tp=2, zero=3), "qwen", 3),
    (Layout(tp=2, pp=2, dp_shard=2, zero=1), "deep-tied", 3),
    (Layout(tp=2, pp=2, dp_replicate=2), "deep", 3),
    (Layout(tp=4, pp=2), "deep-tied", 3),
    (Layout(tp=2, cp=2, dp_shard=2, zero=3), "qwen", 3),
    (Layout(tp=2, cp=2, pp=2), "deep-tied", 3),
    (Layout(dp_replicate=2, dp_shard=2, pp=2, zero=1), "deep-tied", 3),
    (Layout(dp_shard=4, pp=2, zero=3, ep=2), "moe", 3),
    (Layout(dp_shard=2, tp=2, pp=2, zero=1, ep=2), "moe", 2),
    (Layout(tp=2, pp=2, dp_replicate=2, ep=2, schedule="zb-v", stages=2), "latent", 3),
    (Layout(dp_shard=4, tp=2, zero=3, ep=2, expert_tp=2), "biased-moe", 3),
    (Layout(tp=2, cp=2, dp_shard=2, zero=3), "gpt", 2),
]


EVERY = sorted([*ALONE, *PAIRS, *MORE, *LATER], key=lambda case: case[0].world_size)
CASES = sampled(
    EVERY,
    lambda place: EVERY[place] not in LATER,
    lambda layout, family, count: f"{layout.world_size}-{family}-{count}-{named(layout)}",
)


@pytest.mark.parametrize(("layout", "family", "microbatches"), CASES)
def test_layout_equals_one_process(ranks, layout, family, microbatches):
    expected = alone(family)
    for rank, trace in enumerate(ranks(layout.world_size, train, layout, family, microbatches)):
        planned = state_bytes(SPECS[family], layout, rank, PRECISIONS["fp64"], Optim())
        assert trace.state_bytes == (planned.params, planned.grads, planned.optimizer)
        equal(trace, expected)
