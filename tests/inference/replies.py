"""Replies of a tiny model on the ranks of a layout."""

from __future__ import annotations

from itertools import chain

import torch

from kumi.inference.batched_decoder import BatchedDecoder
from kumi.inference.sampling import Sampling
from kumi.nn.decoder import Decoder
from kumi.parallel.build import build
from kumi.parallel.stage_modules import unwrap
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from steps import mesh_of, spec_of

GREEDY = Sampling(max_new_tokens=10, temperature=0)
DRAWN = Sampling(max_new_tokens=10, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, seed=5)


def prompts(vocabulary, lengths=(3, 9, 1, 14, 6)):
    """Return prompts of random token ids."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def replies(layout: Layout, family: str, slots: int, samples: int = 2):
    """Return this rank's greedy and drawn replies, by prompt and sample, with their log-probs; then the rank's
    logits of a forward pass after them."""
    mesh, spec = mesh_of(layout), spec_of(family)
    model = build(spec, mesh, PRECISIONS["fp64"], weights=7)
    decoder = unwrap(model)
    assert isinstance(decoder, Decoder)
    engine = BatchedDecoder(decoder, slots=slots, mesh=mesh)
    asked = prompts(spec.vocab_size)
    each = [list(engine.generate(asked, sampling, samples=samples)) for sampling in (GREEDY, DRAWN)]
    with torch.no_grad():
        logits = decoder(torch.tensor([asked[3][:12]] * 2))
    return [{(reply.prompt, reply.sample): reply for reply in part} for part in each], logits


def merged(results):
    """Return the replies of all ranks together, in which ranks that answer the same prompt agree."""
    everything = [{}, {}]
    for part, merged_part in chain.from_iterable(zip(parts, everything, strict=True) for parts, _ in results):
        for place, reply in part.items():
            assert merged_part.setdefault(place, reply).ids == reply.ids
    return everything
