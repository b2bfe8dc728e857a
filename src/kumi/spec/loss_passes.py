"""The passes that a loss needs beyond the forward and backward of language modelling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossPasses:
    """The work of a loss in a step, beside one forward and one backward pass over its rows.

    `head_again`: the backward pass computes the head's logits again, because the gradient of a log-prob depends on
        others of the same row. A loss with weights that are known before the forward pass has its gradient then.
    `forwards`: forward passes over as many rows, without a gradient: of a reference, or over mismatched rows. Of a run
        with rollouts, those over a rollout batch before its updates: of the policy and of the reference.
    """

    head_again: bool = False
    forwards: int = 0


ONE_PASS = LossPasses()
