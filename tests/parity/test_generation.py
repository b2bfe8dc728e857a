"""Greedy replies of the batched decoder are those of transformers' `generate`, token for token, in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kumi.inference.batched_decoder import BatchedDecoder
from kumi.inference.sampling import Sampling
from tiny_models import CASES, build_pair

# One of each kind of mixer, mask, score and position; the other families run with --all.
OFTEN = (
    "qwen3-biases",
    "mixtral-window",
    "deepseek-v2",
    "deepseek-v3",
    "nemotron-h",
    "gpt-oss",
    "gemma2",
    "gemma3",
    "phi3-longrope",
    "falcon-alibi",
    "bloom",
    "gpt2",
    "cohere2",
)
# With its cache, this model's replies in transformers differ from those without it, which are the ones expected here.
WITHOUT_CACHE = ("nemotron-h",)
TOKENS = 10
FAMILIES = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.exhaustive) for name in CASES]


@cache
def pair(name):
    """Return the model in transformers and in kumi, in float64."""
    reference, decoder = build_pair(name)
    decoder.compute_dtype = torch.float64
    return reference.double().eval(), decoder.double()


def transformers_reply(reference, prompt, use_cache):
    ids = torch.tensor([prompt])
    options = {
        "do_sample": False,
        "max_new_tokens": TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
        "use_cache": use_cache,
    }
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_replies_are_those_of_transformers(name):
    reference, decoder = pair(name)
    generator = torch.Generator().manual_seed(1)
    asked = [torch.randint(0, decoder.spec.vocab_size, (n,), generator=generator).tolist() for n in (3, 9, 1, 14, 6)]
    use_cache = name not in WITHOUT_CACHE
    expected = [transformers_reply(reference, prompt, use_cache) for prompt in asked]
    for slots in (1, 2, 8):
        sampling = Sampling(max_new_tokens=TOKENS, temperature=0)
        answers = {reply.prompt: reply for reply in BatchedDecoder(decoder, slots=slots).generate(asked, sampling)}
        assert [answers[index].ids for index in range(len(asked))] == expected
        assert {reply.finish for reply in answers.values()} == {"length"}
