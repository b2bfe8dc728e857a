"""Token sequences with the mask of the trained tokens, and the refusal of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Version of the code from a row to its tokens and masks, part of a store's fingerprint: raise it by 1 with every change
# after which a row may have other tokens, masks, turns, weights or units.
FORMAT = 3
# Bits of a store's mask file: whether the token is trained, and the number of its role in `kumi.data.formats.ROLES`.
TRAINED, ROLE_SHIFT = 1, 1


@dataclass(frozen=True, slots=True)
class MaskedSequence:
    """The tokens of one sequence, with one value a token in each list.

    ids: token ids.
    mask: `TRAINED` for a trained token, plus the number of the token's role << `ROLE_SHIFT`.
    turns: number of the token's message, from 1; 0 for text of the template before the first message.
    weights: weight in the loss; None if all are 1.
    """

    ids: Sequence[int]
    mask: Sequence[int]
    turns: Sequence[int]
    weights: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class EncodedUnit:
    """Sequences that are packed into the same row: one, or the two sides of a preference.

    label, margin, extra: as in `kumi.data.formats.Example`; `extra` of a prompt has its text, or messages and tools.
    """

    sequences: tuple[MaskedSequence, ...]
    label: bool | None = None
    margin: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class RowRefused(Exception):
    """A row that cannot be trained on as it would be generated.

    kind: a short name under which such rows are counted, for example "template-error".
    reason: one sentence with the offending value and the reason.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason
