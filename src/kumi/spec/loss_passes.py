"""The passes that a loss needs beyond the forward and backward of language modelling."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossPasses:
    """The work of a loss in a step, beside one forward and one backward pass over its rows, the sequences of a batch.

    `head_again`: the backward pass computes the head's logits again, unless `keeps_chunk`, because the weight of a
        log-prob in the gradient depends on other log-probs of its row. If all weights are known before the forward
        pass, the forward pass computes the head's gradient as well.
    `forwards`: further forward passes, without a gradient, over as many rows: by a reference model, or over mismatched
        rows (KTO's pairs of a prompt and the reply to another prompt). In a run with rollouts, these are the passes
        over a rollout batch before its updates: by the policy and by the reference.
    `later_forwards`: further forward passes over the rows of all updates with a rollout batch but the first, which
        needs none.
    """

    head_again: bool = False
    forwards: int = 0
    later_forwards: int = 0

    def mean_forwards(self, updates: int) -> float:
        """Return the mean passes without a gradient over the rows of a rollout batch with `updates` updates."""
        return self.forwards + self.later_forwards * (1 - 1 / updates)


ONE_PASS = LossPasses()


def keeps_chunk(tokens: int, chunk: int, device_kind: str, *, pipelined: bool) -> bool:
    """Return True if the backward pass of log-probs reads the logits of the forward pass, and does not compute them
    again: on a CPU, if all trained `tokens` of a microbatch are in one chunk of at most `chunk` tokens.

    The backward pass follows at once, and would need as much memory for the chunk. A pipeline would have the chunk of
    each microbatch in flight in memory, so it keeps none (`pipelined`). Chunks of other devices are 32 times as large.
    """
    return device_kind == "cpu" and not pipelined and tokens <= chunk
