"""Whether a written model is the one it was made from: every tensor bit by bit, and the logits of three prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from kumi.convert.carried import check_equal
from kumi.convert.source import Source
from kumi.errors import ModelError
from kumi.nn.decoder import Decoder
from kumi.spec.ledger import tensors


def verify(source: Source, written: Source) -> float:
    """The largest difference between the logits of the two models in float32; 0.0 where all tensors are equal.

    ModelError naming the first tensor that is not what `source` has, cast to the dtype it was written in.
    """
    for param in tensors(source.spec):
        found = written.read(param.name)
        if not _bits(found).equal(_bits(source.read(param.name).to(found.dtype))):
            raise ModelError(f"{written.folder}: {param.name!r} differs from {source.folder}; the disk may be failing")
    check_equal(written.carried, source.carried, written.folder)
    prompts = sample_prompts(source.spec.vocab_size, min(16, source.spec.max_position_embeddings))
    return float((_logits(source, prompts) - _logits(written, prompts)).abs().max())


def sample_prompts(vocab_size: int, length: int) -> Tensor:
    """Three fixed rows of token ids (3, S)."""
    return torch.randint(0, vocab_size, (3, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(source: Source, prompts: Tensor) -> Tensor:
    decoder = Decoder(source.spec)
    for name, tensor in decoder.state_dict().items():
        tensor.copy_(source.read(name))
    logits: Tensor = decoder(prompts)
    return logits


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`: equal bits are equal even where a value is not a number."""
    return tensor.contiguous().view(torch.uint8)
