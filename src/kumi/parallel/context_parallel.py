"""Context parallelism: every rank of a cp group has a part of each sequence.

A sequence is cut into 2 * cp pieces, of which rank i has pieces i and 2 * cp - 1 - i, so that causal attention has as
much to compute on all (see `kumi.parallel.ring_attention`). Only attention looks beyond a rank's own tokens:
`layout.context` says how, "ring" or "ulysses". Weights are whole on all of them, and their gradients summed like those
of data ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from kumi.nn.attention.attention_context import Attend, document_lengths, positions, segments
from kumi.nn.attention.grouped_query import attend
from kumi.nn.decoder import Decoder, whole_rows
from kumi.parallel.data_parallel import bare
from kumi.parallel.mesh import Mesh
from kumi.parallel.ring_attention import positions_of, ring_over
from kumi.parallel.stage_modules import stages_of
from kumi.parallel.ulysses import ulysses_over

# What goes to a rank by position; document_ids stay whole, for attention to know where documents begin.
CUT = ("input_ids", "labels", "position_ids", "token_weights")


def cut(inputs: dict[str, Tensor], mesh: Mesh, also: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the part of `inputs` that this rank has: all of them for cp = 1, else its positions of those that the
    decoder reads by position and of `also`, each (B, S).

    Labels must be shifted already. Position ids are made where there are none.
    """
    if mesh.layout.cp == 1:
        return inputs
    ids = inputs["input_ids"]
    if "position_ids" not in inputs:
        inputs = {**inputs, "position_ids": positions(ids, inputs.get("document_ids"))}
    mine = positions_of(ids.shape[1], mesh.layout.cp, mesh.index("cp")).to(ids.device)
    return {name: x.index_select(1, mine) if name in CUT or name in also else x for name, x in inputs.items()}


def attention_over(mesh: Mesh) -> Callable[[Tensor, Tensor | None], Attend]:
    """What `Decoder.attention_over` is for a rank of a cp group: it takes the rank's positions and all document ids."""
    group = mesh.groups["cp"]
    return partial(_ulysses if mesh.layout.context == "ulysses" else _ring, group)


def lengths_over(mesh: Mesh) -> Callable[[Tensor, Tensor | None], int | Tensor]:
    """What `Decoder.lengths_over` is for a rank of a cp group: the lengths of whole documents that it has parts of."""
    return partial(_lengths, mesh.layout.cp, mesh.index("cp"))


def _lengths(cp: int, index: int, tokens: Tensor, document_ids: Tensor | None) -> int | Tensor:
    whole = tokens if document_ids is None else document_ids
    found = document_lengths(whole, document_ids)
    if isinstance(found, int):
        return found * cp
    return found.index_select(1, positions_of(whole.shape[1], cp, index).to(whole.device))


def _ring(group: dist.ProcessGroup, tokens: Tensor, document_ids: Tensor | None) -> Attend:
    rows, length = tokens.shape[0], tokens.shape[1] * group.size()
    if document_ids is None:  # no device need be asked
        return ring_over(list(range(0, rows * length + 1, length)), group)
    found = segments(document_ids, document_ids).bounds
    assert found is not None, f"there are no bounds on {tokens.device}"
    return ring_over(found.tolist() if isinstance(found, Tensor) else found, group)


def _ulysses(group: dist.ProcessGroup, tokens: Tensor, document_ids: Tensor | None) -> Attend:
    return ulysses_over(partial(attend, segments(_whole(tokens, group), document_ids)), group)


def _whole(tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Something of the shape and on the device of the rows of which `tokens` are a part."""
    return tokens.new_empty(tokens.shape[0], tokens.shape[1] * group.size())


@contextmanager
def whole_sequences(model: nn.Module) -> Iterator[None]:
    """Where `model` takes whole sequences, which every rank of a cp group computes for itself."""
    held = [part for part in map(bare, stages_of(model).values()) if isinstance(part, Decoder)]
    kept = [(part.attention_over, part.lengths_over) for part in held]
    for part in held:
        part.attention_over, part.lengths_over = whole_rows, document_lengths
    try:
        yield
    finally:
        for part, before in zip(held, kept, strict=True):
            part.attention_over, part.lengths_over = before
