"""Replies on every layout that the engine supports are those of one process, greedy and drawn, in float64."""

from __future__ import annotations

import pytest
import torch
from replies import merged, replies

from grids import named, sampled
from kumi.spec.layout import Layout

# (layout, model, slots)
OFTEN = [
    (Layout(tp=2), "qwen", 3),
    (Layout(dp_shard=2, zero=3), "llama", 2),
    (Layout(dp_shard=2, ep=2, zero=3), "moe", 2),
    (Layout(tp=2, sequence_parallel=False), "latent", 4),
    (Layout(dp_replicate=2), "hybrid", 8),
]
LATER = [
    (Layout(dp_shard=2, zero=1), "gemma", 3),
    (Layout(dp_shard=2, zero=2), "gpt", 3),
    (Layout(tp=2), "hybrid", 3),
    (Layout(tp=2), "sinks", 5),
    (Layout(tp=2), "latent", 1),
    (Layout(tp=4), "qwen", 3),
    (Layout(tp=2, expert_tp=2), "biased-moe", 3),
    (Layout(dp_shard=2, tp=2, zero=1, ep=2), "moe", 2),
    (Layout(dp_shard=4, ep=4, zero=3), "moe", 1),
    (Layout(dp_replicate=2, dp_shard=2, zero=3), "gemma", 2),
]
EVERY = [*OFTEN, *LATER]
CASES = sampled(
    EVERY,
    lambda place: EVERY[place] in OFTEN,
    lambda layout, family, slots: f"{layout.world_size}-{family}-{named(layout)}",
)


@pytest.mark.parametrize(("layout", "family", "slots"), CASES)
def test_replies_of_a_layout_are_those_of_one_process(ranks, layout, family, slots):
    (alone,) = ranks(1, replies, Layout(), family, 7)
    results = ranks(layout.world_size, replies, layout, family, slots)
    expected = alone[0]
    for part, expected_part in zip(merged(results), expected, strict=True):
        assert {place: reply.ids for place, reply in part.items()} == {
            place: reply.ids for place, reply in expected_part.items()
        }
        for place, reply in part.items():
            torch.testing.assert_close(
                torch.tensor(reply.log_probs), torch.tensor(expected_part[place].log_probs), rtol=1e-6, atol=1e-6
            )
            assert reply.finish == expected_part[place].finish
    # The model can go on training: its parameters are sharded again.
    for _, logits in results:
        torch.testing.assert_close(logits, alone[1], rtol=1e-9, atol=1e-9)
