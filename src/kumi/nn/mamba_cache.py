"""The state of Mamba layers between tokens, one sequence per slot, for generation. It records no gradients.

A sequence keeps the last inputs of the three convolutions and the state of the recurrence. See
`kumi.nn.attention.cached_attention` for the steps that fill and extend a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kumi.nn.attention.cached_attention import ExtendStep, Step, TokenStep, copy_slot
from kumi.nn.dtypes import wide
from kumi.nn.mamba import Convolution
from kumi.nn.mamba_scan import ScanInputs, continue_scan, final_state, scan, scan_step


class MambaCache:
    """The state of one layer.

    `tails`: for each convolution, its last inputs (slots, kernel - 1, C), the latest last; zeros in the place of inputs
        before the sequence's first.
    `states` (slots, H, P, N): the states of the recurrence.
    """

    def __init__(self, tails: Sequence[Tensor], states: Tensor) -> None:
        self.tensors = (*tails, states)

    def convolve(
        self, step: Step, convolutions: Sequence[Convolution], inputs: Sequence[Tensor], numbers: Tensor | None
    ) -> list[Tensor]:
        """Return the result of each convolution for its input, in the input's shape.

        `inputs`: (1, T, C) of prompts or of new tokens of one slot, or (N, 1, C) of one new token of each slot.
        `numbers` (1, T): document numbers of the tokens of prompts, or None.
        """
        pairs = list(zip(convolutions, inputs, self.tensors, strict=False))
        if isinstance(step, TokenStep):
            return [_convolve_token(convolution, x, tail) for convolution, x, tail in pairs]
        if isinstance(step, ExtendStep):
            return [_convolve_more(convolution, x, tail[step.slot]) for convolution, x, tail in pairs]
        for _, x, tail in pairs:
            for prompt in step.prompts:
                last = x[0, max(prompt.start, prompt.stop - tail.shape[1]) : prompt.stop]
                for slot in prompt.slots:
                    tail[slot] = F.pad(last, (0, 0, tail.shape[1] - len(last), 0))
        return [convolution(x, numbers) for convolution, x, _ in pairs]

    def scan(self, step: Step, inputs: ScanInputs) -> Tensor:
        """Return the result (B, S, H, P) of the recurrence for the tokens of `step`."""
        states = self.tensors[-1]
        if isinstance(step, TokenStep):
            count = len(inputs.x)
            out, states[:count] = scan_step(inputs, states[:count])
            return out
        if isinstance(step, ExtendStep):
            out, states[step.slot] = continue_scan(inputs, states[step.slot])
            return out
        for prompt in step.prompts:
            state = final_state(inputs, prompt.start, prompt.stop)
            for slot in prompt.slots:
                states[slot] = state
        return scan(inputs)

    def copy(self, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        copy_slot(self.tensors, source, target)


def _convolve_more(convolution: Convolution, x: Tensor, tail: Tensor) -> Tensor:
    """Return the convolution (1, T, C) of new tokens `x` after those in `tail` (kernel - 1, C), and put the last
    tokens into `tail`."""
    window = torch.cat((tail[None], x), dim=1)
    tail.copy_(window[0, len(window[0]) - len(tail) :])
    out: Tensor = convolution(window, None)[:, len(tail) :]
    return out


def _convolve_token(convolution: Convolution, x: Tensor, tail: Tensor) -> Tensor:
    """Return the convolution (N, 1, C) of new tokens `x` (N, 1, C) after those in `tail`, and put `x` into `tail`."""
    count, dtype = len(x), wide(x.dtype)
    window = torch.cat((tail[:count], x), dim=1)
    tail[:count] = window[:, 1:]
    out = (window.to(dtype) * convolution.weight.to(dtype)[:, 0].T).sum(1)
    out = out if convolution.bias is None else out + convolution.bias.to(dtype)
    return F.silu(out).to(x.dtype)[:, None]
