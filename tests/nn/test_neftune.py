"""The distribution of NEFTune's noise, and how it relates to Hugging Face's hook."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from kumi.nn.attention.attention_context import document_lengths
from kumi.nn.neftune import row_noise, scaled_noise

OPTIONS = {"device": torch.device("cpu"), "seed": 4, "step": 2, "row": 9}
SIZE, ALPHA = 48, 5.0


def test_noise_is_uniform_and_independent():
    noise = row_noise(torch.arange(512), SIZE, **OPTIONS)
    # Kolmogorov's statistic: 1.95 is exceeded once in a thousand seeds.
    ordered, count = noise.flatten().double().sort().values, noise.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distances = torch.stack([(ordered + 1) / 2 - steps[:-1], steps[1:] - (ordered + 1) / 2])
    assert distances.max() * count**0.5 < 1.95
    deviation = 512**-0.5  # of a correlation of independent numbers
    for shift in (1, 128):
        products = 3 * noise[shift:] * noise[:-shift]
        assert abs(products.mean()) < 5 * deviation / SIZE**0.5
    for other in ({"seed": 5}, {"step": 3}, {"row": 10}):
        assert abs((3 * noise * row_noise(torch.arange(512), SIZE, **OPTIONS | other)).mean()) < 5 * deviation / 7


def test_noise_of_a_position_does_not_depend_on_the_other_positions():
    whole = row_noise(torch.arange(300), SIZE, **OPTIONS)
    some = torch.tensor([299, 0, 127, 128, 200])
    assert row_noise(some, SIZE, **OPTIONS).equal(whole[some])


def _bound_of_hugging_face(rows, length):
    """The largest noise of Hugging Face's hook on rows of `length`."""
    module = SimpleNamespace(training=True, neftune_noise_alpha=ALPHA)
    return neftune_post_forward_hook(module, None, torch.zeros(rows, length, SIZE)).abs().max().item()


def test_a_row_of_one_document_has_the_noise_of_hugging_face():
    length = 300
    noise = row_noise(torch.arange(length), SIZE, **OPTIONS)
    lengths = document_lengths(torch.zeros(1, length), None)
    assert scaled_noise(noise, lengths, ALPHA).abs().max() == pytest.approx(_bound_of_hugging_face(1, length), rel=1e-3)


def test_packed_documents_have_the_noise_of_their_own_lengths_and_hugging_face_that_of_the_row():
    """The deviation: Hugging Face's hook takes the length of the row, whatever is packed into it."""
    lengths = [40, 260]
    documents = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None]
    noise = row_noise(torch.arange(300), SIZE, **OPTIONS)
    own = document_lengths(documents, documents).flatten()
    packed = scaled_noise(noise, own, ALPHA).split(lengths)
    row = _bound_of_hugging_face(1, 300)
    for part, length in zip(packed, lengths, strict=True):
        assert part.abs().max() == pytest.approx(_bound_of_hugging_face(1, length), rel=2e-2)
        assert part.abs().max() == pytest.approx(row * (300 / length) ** 0.5, rel=2e-2)
