"""Context parallelism: every rank of a cp group has a part of each sequence.

A sequence is split into 2 * cp pieces. Rank i has pieces i and 2 * cp - 1 - i, which gives all ranks the same amount of
work in causal attention (see `kumi.parallel.ring_attention`). Only attention needs the tokens of other ranks:
`layout.context` selects "ring" or "ulysses". Weights are replicated over cp, and their gradients are summed as over
data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from kumi.nn.attention.attention_context import (
    AttentionFn,
    MakeAttention,
    document_bounds,
    document_lengths,
    positions,
    segments,
)
from kumi.nn.attention.grouped_query import attend
from kumi.nn.decoder import Decoder, unsharded_attention
from kumi.parallel.mesh import Mesh
from kumi.parallel.ring_attention import positions_of_rank, ring_attention_fn
from kumi.parallel.stage_modules import stages_of, unwrap
from kumi.parallel.ulysses import ulysses_attention_fn

# Columns (named tensors of a batch) that are sharded by position. document_ids are not: attention needs the boundaries
# of all documents.
SHARDED_COLUMNS = ("input_ids", "labels", "position_ids", "token_weights")


def shard_sequence(inputs: dict[str, Tensor], mesh: Mesh, also: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the columns `inputs` (B, S) with this rank's positions only; `inputs` itself for cp = 1.

    `SHARDED_COLUMNS` and the columns named in `also` are sharded, others are returned whole. Labels must be shifted
    already. Missing position ids are added.
    """
    if mesh.layout.cp == 1:
        return inputs
    ids = inputs["input_ids"]
    if "position_ids" not in inputs:
        inputs = {**inputs, "position_ids": positions(ids, inputs.get("document_ids"))}
    local_positions = positions_of_rank(ids.shape[1], mesh.layout.cp, mesh.index("cp")).to(ids.device)
    return {
        name: x.index_select(1, local_positions) if name in SHARDED_COLUMNS or name in also else x
        for name, x in inputs.items()
    }


def context_parallel_attention(mesh: Mesh) -> MakeAttention:
    """Return the `Decoder.make_attention` of a cp group: a function of the rank's tokens and all document ids."""
    group = mesh.groups["cp"]
    return partial(_ulysses if mesh.layout.context == "ulysses" else _ring, group)


def context_parallel_lengths(mesh: Mesh) -> Callable[[Tensor, Tensor | None], int | Tensor]:
    """Return the `Decoder.make_lengths` of a cp group: the lengths of the complete documents of the rank's tokens."""
    return partial(_lengths, mesh.layout.cp, mesh.index("cp"))


def _lengths(cp: int, index: int, tokens: Tensor, document_ids: Tensor | None) -> int | Tensor:
    """Return the length of the document of each of the rank's `tokens`, an int if all are the same."""
    ids = tokens if document_ids is None else document_ids
    lengths = document_lengths(ids, document_ids)
    if isinstance(lengths, int):
        return lengths * cp
    return lengths.index_select(1, positions_of_rank(ids.shape[1], cp, index).to(ids.device))


def _ring(
    group: dist.ProcessGroup, tokens: Tensor, document_ids: Tensor | None, cu_seqlens: Sequence[int] | None = None
) -> AttentionFn:
    """Return ring attention for the rank's `tokens` (B, S / cp) and the `document_ids` (B, S) of unsharded rows."""
    rows, length = tokens.shape[0], tokens.shape[1] * group.size()
    if document_ids is None:  # the boundaries follow from the shape, so the host need not wait for the device
        return ring_attention_fn(list(range(0, rows * length + 1, length)), group)
    return ring_attention_fn(list(cu_seqlens or document_bounds(document_ids).tolist()), group)


def _ulysses(
    group: dist.ProcessGroup, tokens: Tensor, document_ids: Tensor | None, cu_seqlens: Sequence[int] | None = None
) -> AttentionFn:
    """Return Ulysses attention, given the same arguments as `_ring`."""
    return ulysses_attention_fn(partial(attend, segments(_full_rows(tokens, group), document_ids, cu_seqlens)), group)


def _full_rows(tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return an uninitialised tensor of the shape of the unsharded rows, on the device of `tokens`."""
    return tokens.new_empty(tokens.shape[0], tokens.shape[1] * group.size())


@contextmanager
def unsharded_sequences(model: nn.Module) -> Iterator[None]:
    """A context in which `model` takes unsharded sequences: every rank of a cp group computes them redundantly."""
    decoders = [stage for stage in map(unwrap, stages_of(model).values()) if isinstance(stage, Decoder)]
    slots = [(decoder.make_attention, decoder.make_lengths) for decoder in decoders]
    for decoder in decoders:
        decoder.make_attention, decoder.make_lengths = unsharded_attention, document_lengths
    try:
        yield
    finally:
        for decoder, before in zip(decoders, slots, strict=True):
            decoder.make_attention, decoder.make_lengths = before
