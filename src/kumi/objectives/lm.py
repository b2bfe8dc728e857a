"""Language modelling: the mean negative log-probability of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100


def token_weights(labels: Tensor, tokens: float) -> Tensor:
    """What the log-probability of each label adds to the loss: float32 (B, S), 0 where the label is -100.

    `tokens` counts the trained tokens of the whole step, over all ranks and microbatches, so that every token weighs
    the same however the step is cut.
    """
    return (labels != IGNORED).float() * (-1.0 / tokens)
