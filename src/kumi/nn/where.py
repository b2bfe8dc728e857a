"""Where the tokens of a batch stand: their positions, their documents, and what each may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from kumi.nn import rope
from kumi.nn.scores import PLAIN, Scores
from kumi.spec.model import Attention, LatentAttention, Rope

# Which rotation, of how many dims of a head.
Rotary = tuple[Rope, int]


class Attend(Protocol):
    """Attention of a batch."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        sinks: Tensor | None = None,
        scores: Scores = PLAIN,
        /,
    ) -> Tensor:
        """(B, S, H, E'), of each query `q` (B, S, H, E) over its past in `k` (B, S, K, E) and `v` (B, S, K, E').

        `sinks` (H,): the score of looking nowhere, as if each query saw one more key, whose value is zero. `scores`
        says what becomes of the products of queries with keys.
        """


@dataclass(frozen=True)
class Segments:
    """Where the documents of a batch lie, worked out once and used by every layer.

    `bounds`: the tokens, numbered through the batch, at which documents begin, and their count at the end; a row begins
    one. On the CPU a list, on CUDA the int32 tensor that variable-length attention takes, elsewhere None.
    `document_ids` (B, S) has another value on each side of a boundary; it is None where a row is one document.
    """

    document_ids: Tensor | None
    bounds: list[int] | Tensor | None

    @cached_property
    def marks(self) -> list[int]:
        """`bounds` as a list: where they are a tensor, their device is waited for, once."""
        assert self.bounds is not None
        return self.bounds.tolist() if isinstance(self.bounds, Tensor) else self.bounds


@dataclass(frozen=True)
class Where:
    """What a layer needs besides hidden states: `shape` (B, S) of the tokens, whose hidden states may come flattened;
    cos and sin of every rotation in use; the attention over them; and `document_ids` (B, S), which differ on the two
    sides of a boundary between documents, None where a row is one."""

    shape: tuple[int, int]
    tables: Mapping[Rotary, tuple[Tensor, Tensor]]
    attend: Attend
    document_ids: Tensor | None = None


def rotary(spec: Attention | LatentAttention) -> Rotary | None:
    """The rotation of a layer's heads, None where it has none."""
    return None if spec.rope is None else (spec.rope, spec.rotary_dim)


def of_keys(turn: Rotary) -> Rotary:
    """The rotation of keys beside queries that are turned by `turn`."""
    return turn[0].of_keys, turn[1]


def tables(
    specs: Iterable[Attention | LatentAttention], position_ids: Tensor, lengths: Callable[[], int | Tensor]
) -> dict[Rotary, tuple[Tensor, Tensor]]:
    """cos and sin (B, S, 1, R) of every rotation in `specs` at `position_ids` (B, S). `lengths` is called where a
    rotation depends on how long the document of a position is."""
    turns = [key for spec in specs if (key := rotary(spec)) is not None]
    length = lengths() if any(turn.depends_on_length for turn, _ in turns) else 0
    return {key: rope.tables(*key, position_ids, length) for key in {*turns, *map(of_keys, turns)}}


def document_lengths(tokens: Tensor, document_ids: Tensor | None) -> int | Tensor:
    """The length of the document that each token of a batch of the shape of `tokens` (B, S) belongs to: (B, S), or one
    number where a row is a document (`document_ids` is None)."""
    if document_ids is None:
        return tokens.shape[1]
    number = begins(document_ids).flatten().cumsum(0) - 1
    counts = torch.zeros_like(number).index_add_(0, number, torch.ones_like(number))
    return counts[number].view(document_ids.shape)


def segments(tokens: Tensor, document_ids: Tensor | None) -> Segments:
    """The segments of a batch of the shape of `tokens` (B, S) whose documents `document_ids` (B, S) tells apart; None:
    a row is a document."""
    rows, length = tokens.shape
    if tokens.device.type not in ("cpu", "cuda"):
        return Segments(document_ids, None)
    if document_ids is None:
        starts = range(0, rows * length + 1, length)
        return Segments(None, list(starts) if tokens.device.type == "cpu" else _marks(starts, tokens.device))
    end = torch.tensor([rows * length], device=tokens.device)
    bounds = torch.cat([begins(document_ids).flatten().nonzero()[:, 0], end])
    return Segments(document_ids, bounds.tolist() if tokens.device.type == "cpu" else bounds.int())


def _marks(starts: range, device: torch.device) -> Tensor:
    return torch.arange(starts.start, starts.stop, starts.step, dtype=torch.int32, device=device)


def begins(document_ids: Tensor) -> Tensor:
    """True (B, S) at the first token of every document."""
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return first


def positions(input_ids: Tensor, document_ids: Tensor | None) -> Tensor:
    """Positions (B, S) that count from 0 in every document."""
    index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if document_ids is None:
        return index
    return index - torch.where(begins(document_ids), index, 0).cummax(dim=1).values
