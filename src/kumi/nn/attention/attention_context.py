"""Per-batch attention metadata: positions, document boundaries, rotations, the attention function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kumi.nn import rope
from kumi.nn.attention.scores import PLAIN_SCORES, Scores
from kumi.spec.model import Attention, LatentAttention, Rope

if TYPE_CHECKING:
    from torch import nn

    from kumi.nn.mamba_scan import ScanInputs

# A rotation and the number of dims of a head that it rotates.
Rotary = tuple[Rope, int]


class MakeAttention(Protocol):
    """Returns the attention function of a batch, given the arguments of `segments`."""

    def __call__(
        self, tokens: Tensor, document_ids: Tensor | None, cu_seqlens: Sequence[int] | None = None, /
    ) -> AttentionFn: ...


class AttentionFn(Protocol):
    """The attention function of one batch: its documents are bound already."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: int | None,
        sinks: Tensor | None = None,
        scores: Scores = PLAIN_SCORES,
        /,
    ) -> Tensor:
        """Return causal attention (B, S, H, E') of `q` (B, S, H, E) over `k` (B, S, K, E) and `v` (B, S, K, E').

        `window`: a query sees at most this many latest keys; None for no limit.
        `sinks` (H,): one more score per head in the softmax, as of a key with a zero value.
        `scores`: how the product of a query and a key becomes a score.
        """


class LatentMemory(Protocol):
    """The cached latents of one layer of latent attention, bound to the tokens of one forward pass."""

    @property
    def attends(self) -> bool:
        """True if queries attend to the cache; False for whole prompts, which attend to their own tokens."""

    def store(self, latents: Tensor, keys: Tensor) -> None:
        """Add the latents (B, S, rank) and rotated keys (B, S, R) of these tokens to the cache."""

    def attend(self, q: Tensor, up: Callable[[], Tensor], nope_size: int) -> Tensor:
        """Return attention (B, S, H, E') of `q` (B, S, H, E) over the cached tokens, with those of this pass.

        `up` returns the projection (H * (nope_size + E'), rank) from latents to the keys and values of each head.
        """


class RecurrentMemory(Protocol):
    """The state of one recurrent layer, bound to the tokens of one forward pass."""

    def convolve(
        self, convolutions: Sequence[nn.Module], inputs: Sequence[Tensor], numbers: Tensor | None
    ) -> list[Tensor]:
        """Return the result of each of `convolutions` (see `kumi.nn.mamba.Convolution`) for its input (B, S, C)."""

    def scan(self, inputs: ScanInputs) -> Tensor:
        """Return the result (B, S, H, P) of the recurrence."""


class OnHost:
    """The document boundaries of a batch in the host's memory, as an object whose content compiled layers ignore.

    PyTorch's compiler looks at a plain list that reaches a checkpointed layer, and compiles the layer again for every
    other number of documents: version 2.11, even if no operation reads the list.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = list(bounds)


@dataclass(frozen=True)
class Segments:
    """The document boundaries of a batch, computed once and used by every layer.

    `cu_seqlens`: the first token of each document, counted through the batch, followed by the number of tokens. Every
    row starts a document. `cu_seqlens` is a list on the CPU, an int32 tensor for variable-length attention on CUDA, and
    None on other devices.
    `document_ids` (B, S): changes at each boundary within a row; None if every row is one document.
    `on_host`: `cu_seqlens` in the host's memory; None if only the device has it.
    `block_masks`: the masks of FlexAttention by window, where compiled layers use them (see `kumi.nn.attention.flex`).
    """

    document_ids: Tensor | None
    cu_seqlens: list[int] | Tensor | None
    on_host: OnHost | None = None
    block_masks: Mapping[int | None, Any] = field(default_factory=dict)

    @cached_property
    def cu_seqlens_list(self) -> list[int]:
        """`cu_seqlens` as a list. If only the device has it, the first access waits for the device."""
        if self.on_host is not None:
            return self.on_host.bounds
        assert self.cu_seqlens is not None
        return self.cu_seqlens.tolist() if isinstance(self.cu_seqlens, Tensor) else self.cu_seqlens

    @cached_property
    def _masks(self) -> dict[tuple[int, int | None, torch.dtype, torch.device], Tensor]:
        return {}

    def mask(self, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the mask (B or 1, 1, S, S) that is added to scores: 0 where a query sees a key, -inf elsewhere.

        All layers with the same window share one tensor, which they also keep for the backward pass. PyTorch would
        convert a mask of bools in every layer.
        """
        key = length, window, dtype, device
        if key not in self._masks:
            seen = visible(self.document_ids, length, window, device)
            self._masks[key] = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
        return self._masks[key]


@dataclass(frozen=True)
class AttentionContext:
    """The inputs of a layer other than hidden states.

    `shape`: (B, S) of the tokens; hidden states may come flattened to (T, D).
    `cos_sin`: cos and sin of each rotation in use.
    `attend`: the attention function of this batch.
    `document_ids` (B, S): changes at each document boundary within a row; None if every row is one document.
    `latents`, `recurrence`: what a layer of latent attention or of Mamba keeps of earlier tokens, in generation.
    """

    shape: tuple[int, int]
    cos_sin: Mapping[Rotary, tuple[Tensor, Tensor]]
    attend: AttentionFn
    document_ids: Tensor | None = None
    latents: LatentMemory | None = None
    recurrence: RecurrentMemory | None = None


def rotary(spec: Attention | LatentAttention) -> Rotary | None:
    """Return the rotation of a layer's query heads, or None without rotary embeddings."""
    return None if spec.rope is None else (spec.rope, spec.rotary_dim)


def key_rotary(rotation: Rotary) -> Rotary:
    """Return the rotation of the keys that belong to queries rotated by `rotation`; Llama 4 scales only queries."""
    return rotation[0].key_rope, rotation[1]


def cos_sin_tables(
    specs: Iterable[Attention | LatentAttention], position_ids: Tensor, lengths: Callable[[], int | Tensor]
) -> dict[Rotary, tuple[Tensor, Tensor]]:
    """Return cos and sin (B, S, 1, R) of each rotation in `specs` at `position_ids` (B, S).

    `lengths` returns the document lengths; it is called only if a rotation depends on them.
    """
    rotations = [key for spec in specs if (key := rotary(spec)) is not None]
    length = lengths() if any(rope_spec.depends_on_length for rope_spec, _ in rotations) else 0
    return {key: rope.cos_sin(*key, position_ids, length) for key in {*rotations, *map(key_rotary, rotations)}}


def document_lengths(tokens: Tensor, document_ids: Tensor | None) -> int | Tensor:
    """Return the length (B, S) of the document that each token belongs to, or S if every row is one document.

    Only the shape and the device of `tokens` (B, S) are used. `document_ids` is None if every row is one document.
    """
    if document_ids is None:
        return tokens.shape[1]
    documents = document_starts(document_ids).flatten().cumsum(0) - 1
    counts = torch.zeros_like(documents).index_add_(0, documents, torch.ones_like(documents))
    return counts[documents].view(document_ids.shape)


def segments(tokens: Tensor, document_ids: Tensor | None, cu_seqlens: Sequence[int] | None = None) -> Segments:
    """Return the document boundaries of a batch.

    Only the shape and the device of `tokens` (B, S) are used. `document_ids` (B, S) is None if every row is one
    document. `cu_seqlens`: the boundaries, if the host has them; without them, a GPU's `document_ids` are read, for
    which the host waits.
    """
    (rows, length), device = tokens.shape, tokens.device
    if device.type not in ("cpu", "cuda"):
        return Segments(document_ids, None)
    if document_ids is None:
        starts = range(0, rows * length + 1, length)
        if device.type == "cpu":
            return Segments(None, list(starts))
        on_device = torch.arange(starts.start, starts.stop, starts.step, dtype=torch.int32, device=device)
        return Segments(None, on_device, OnHost(starts))
    if cu_seqlens is not None:
        if device.type == "cpu":
            return Segments(document_ids, list(cu_seqlens))
        on_device = torch.tensor(cu_seqlens, dtype=torch.int32).to(device, non_blocking=True)
        return Segments(document_ids, on_device, OnHost(cu_seqlens))
    bounds = document_bounds(document_ids)
    return Segments(document_ids, bounds.tolist() if device.type == "cpu" else bounds)


def document_bounds(document_ids: Tensor) -> Tensor:
    """Return the first token of each document, counted through the batch (B, S), and the number of tokens: int32.

    If `document_ids` is on a GPU, the host waits for it.
    """
    end = torch.tensor([document_ids.numel()], device=document_ids.device)
    return torch.cat([document_starts(document_ids).flatten().nonzero()[:, 0], end]).int()


def document_starts(document_ids: Tensor) -> Tensor:
    """Return True (B, S) at the first token of each document."""
    first = torch.ones_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return first


def visible(document_ids: Tensor | None, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return True (B or 1, 1, S, S) where query s may attend to key t."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    in_window = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if document_ids is None:
        return in_window[None, None]
    return (document_ids[:, :, None] == document_ids[:, None, :])[:, None] & in_window


def positions(input_ids: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return the position (B, S) of each token in its document, from 0."""
    index = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if document_ids is None:
        return index
    return index - torch.where(document_starts(document_ids), index, 0).cummax(dim=1).values
