"""Draws follow the exact distribution, and the filters are those of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kumi.errors import ConfigError
from kumi.inference.noise import log_exponentials, position_key, sequence_key
from kumi.inference.sampling import Sampling, choose_tokens, filtered

DRAWS, VOCABULARY = 40_000, 50


def rows_of_logits(rows, size, scale=2.0):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * scale


def keys_of(count, seed=0):
    return [position_key(sequence_key(seed, [5, 7], index % 100), index // 100) for index in range(count)]


def chi_square(counts, probs):
    """Return the statistic and its standard score, after joining outcomes expected fewer than five times."""
    expected = probs * counts.sum()
    rare = expected < 5
    pairs = [*zip(counts[~rare], expected[~rare], strict=True), (counts[rare].sum(), expected[rare].sum())]
    terms = [float((count - mean) ** 2 / mean) for count, mean in pairs if mean > 0]
    freedom = len(terms) - 1
    # Wilson and Hilferty (1931): the cube root of a chi-square variate over its mean is nearly normal.
    return (((sum(terms) / freedom) ** (1 / 3)) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=12),
        Sampling(top_p=0.8),
        Sampling(temperature=1.2, min_p=0.1),
        Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    ],
    ids=lambda sampling: f"{sampling.temperature}-{sampling.top_k}-{sampling.top_p}-{sampling.min_p}",
)
def test_draws_follow_the_distribution(sampling):
    logits = rows_of_logits(1, VOCABULARY)
    allowed = filtered(logits / sampling.temperature, sampling)[0].softmax(0)
    tokens, log_probs = choose_tokens(logits.expand(DRAWS, -1), keys_of(DRAWS), sampling)
    counts = torch.bincount(tokens, minlength=VOCABULARY)
    assert counts[allowed == 0].sum() == 0
    # A right sampler exceeds four standard deviations once in 30,000 seeds; this seed is fixed.
    assert abs(chi_square(counts, allowed)) < 4
    expected = (logits / sampling.temperature).log_softmax(1)[0, tokens]
    torch.testing.assert_close(log_probs, expected)


def test_a_wrong_distribution_would_be_seen():
    logits = rows_of_logits(1, VOCABULARY)
    tokens, _ = choose_tokens(logits.expand(DRAWS, -1), keys_of(DRAWS), Sampling(temperature=1.05))
    assert chi_square(torch.bincount(tokens, minlength=VOCABULARY), logits[0].softmax(0)) > 4


def test_consecutive_positions_and_samples_are_independent():
    probs = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    keys = keys_of(DRAWS)
    tokens, _ = choose_tokens(probs.log().expand(DRAWS, -1), keys, Sampling())
    for shift in (1, 100):  # the next sample at the same position; the next position of the same sample
        pairs = torch.bincount(tokens[:-shift] * 3 + tokens[shift:], minlength=9)
        assert abs(chi_square(pairs, (probs[:, None] * probs).flatten())) < 4


def test_filters_are_those_of_transformers_on_1000_rows():
    logits = rows_of_logits(1000, 400)
    for temperature, top_k, top_p, min_p in [
        (1.0, 0, 0.9, 0.0),
        (0.6, 0, 0.3, 0.0),
        (2.5, 0, 0.97, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.4, 0, 1.0, 0.3),
        (0.8, 40, 0.9, 0.02),
        (1.1, 1000, 0.5, 0.0),
    ]:
        warpers = [TemperatureLogitsWarper(temperature)]
        warpers += [TopKLogitsWarper(top_k)] if top_k else []
        warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        warpers += [MinPLogitsWarper(min_p)] if min_p else []
        expected = logits
        for warper in warpers:
            expected = warper(None, expected)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert torch.equal(filtered(logits / temperature, sampling), expected)


def test_noise_is_a_function_of_key_and_token_alone():
    keys = keys_of(6)
    whole = log_exponentials(keys, 0, 1000, device=torch.device("cpu"))
    part = log_exponentials(keys[2:4], 300, 200, device=torch.device("cpu"))
    assert torch.equal(part, whole[2:4, 300:500])
    assert len({float(value) for value in whole.flatten()}) > 5900
    values = log_exponentials(keys_of(2000), 0, 500, device=torch.device("cpu")).exp()
    # Mean and variance of a standard exponential variate, over a million draws.
    assert abs(values.mean() - 1) < 0.005
    assert abs(values.var() - 1) < 0.015


def test_noise_of_the_largest_hash_is_finite():
    # Of key 77 and token 696,042 all 24 bits are set. With infinite noise the only allowed token could not be drawn.
    noise = log_exponentials([77], 696_042, 1, device=torch.device("cpu"))
    assert noise.item() == pytest.approx(math.log(24 * math.log(2)), rel=1e-6)


def test_keys_differ_by_seed_prompt_sample_and_position():
    sequences = {
        sequence_key(seed, prompt, sample)
        for seed in range(3)
        for prompt in ([1, 2], [12], [1, 2, 3], [2, 1])
        for sample in range(3)
    }
    assert len(sequences) == 36
    assert len({position_key(key, position) for key in sequences for position in range(50)}) == 36 * 50


def test_greedy_takes_the_most_probable_token_and_the_first_of_equal_ones():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 2.0, 0.0]])
    tokens, log_probs = choose_tokens(logits, [0, 0], Sampling(temperature=0))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(log_probs, logits.log_softmax(1)[[0, 1], [1, 0]])
    assert choose_tokens(logits, [0, 0], Sampling(temperature=0), padding=3)[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 2.0),
        ("stop_strings", ("",)),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})
