"""Generate text from a decoder, for a first look at a model. It has no key-value cache and is not meant for serving."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kumi.nn.decoder import Decoder


@torch.no_grad()
def generate(
    decoder: Decoder, prompt: Sequence[int], count: int, *, temperature: float, seed: int, stop: Collection[int]
) -> list[int]:
    """Return up to `count` token ids that continue `prompt`, ending before the first one in `stop`.

    `temperature` 0 takes the most likely token. Each token costs a forward pass over all tokens so far; a token sees at
    most the last max_position_embeddings tokens.
    """
    device = decoder.head_weight.device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(count):
        context = torch.tensor([ids[-decoder.spec.max_position_embeddings :]], device=device)
        logits = decoder(context)[0, -1].float().cpu()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
        if token in stop:
            break
        ids.append(token)
    return ids[len(prompt) :]
