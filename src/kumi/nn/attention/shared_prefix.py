"""Attention of texts that continue a shared beginning, which is in the row only once.

A document of a row that begins at a position p above 0 is a branch: it continues the latest document that begins at
position 0, and sees the first p tokens of that document and its own tokens.

    tokens     a b c d   d x   d y z   e f
    documents  0 0 0 0   1 1   2 2 2   3 3
    positions  0 1 2 3   3 4   3 4 5   0 1      branches 1 and 2 see a b c

No gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kumi.nn.attention.attention_context import AttentionFn, document_starts, segments
from kumi.nn.attention.extended_attention import extended_attention
from kumi.nn.attention.grouped_query import attend
from kumi.nn.attention.scores import PLAIN_SCORES, Scores
from kumi.spec.model import Mamba, ModelSpec


class Branch(NamedTuple):
    """Tokens `start` to `stop` of row `row`, which see the `shared` tokens that begin at `root`, and themselves."""

    row: int
    root: int
    shared: int
    start: int
    stop: int


def supports_branches(spec: ModelSpec) -> bool:
    """Return True if the layers of a model compute branches.

    A recurrent state has no branches. A rotation that depends on the document's length would rotate the shared
    beginning differently for each branch.
    """
    return all(
        not isinstance(layer.attention, Mamba)
        and (layer.attends is None or layer.attends.rope is None or not layer.attends.rope.depends_on_length)
        for layer in spec.layers
    )


def branching_attention(
    position_ids: Tensor, document_ids: Tensor | None, cu_seqlens: Sequence[int] | None = None
) -> AttentionFn:
    """Return the attention function of a batch (B, S) with branches, whose rows are not sharded over ranks.

    It is a `Decoder.make_attention`.
    """
    documents = partial(attend, segments(position_ids, document_ids, cu_seqlens))
    branches = [] if document_ids is None else find_branches(position_ids, document_ids)
    return partial(_attend, documents, branches) if branches else documents


def find_branches(position_ids: Tensor, document_ids: Tensor) -> list[Branch]:
    """Return the branches of a batch (B, S)."""
    result, length = [], position_ids.shape[1]
    for row, starts in enumerate(document_starts(document_ids)):
        bounds = [*starts.nonzero()[:, 0].tolist(), length]
        positions, root = position_ids[row].tolist(), 0
        for start, stop in pairwise(bounds):
            if positions[start] == 0:
                root = start
            else:
                result.append(Branch(row, root, positions[start], start, stop))
    return result


def _attend(
    documents: AttentionFn,
    branches: Sequence[Branch],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    sinks: Tensor | None = None,
    scores: Scores = PLAIN_SCORES,
) -> Tensor:
    """Return the result of `AttentionFn`: `documents` computes all documents separately, then branches are replaced."""
    out = documents(q, k, v, window, sinks, scores)
    for row, root, shared, start, stop in branches:
        keys, values = (torch.cat((x[row, root : root + shared], x[row, start:stop])).transpose(0, 1) for x in (k, v))
        out[row, start:stop] = extended_attention(q[row, start:stop], keys, values, 0, window, sinks, scores)
    return out
