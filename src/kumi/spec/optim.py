"""The optimizer and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from kumi.errors import ConfigError

KINDS = ("adamw", "adamw-8bit", "muon", "adafactor", "sgd")

# What AdamW keeps for a parameter: a value for each of its elements by each of these names, and a step counter.
MOMENTS, COUNTER = ("exp_avg", "exp_avg_sq"), "step"

# bitsandbytes: elements that share a float32 scale, and the size below which a tensor's moments stay in float32.
BLOCK, SMALL = 256, 4096


@dataclass(frozen=True)
class Optim:
    """An optimizer and its learning-rate schedule.

    `kind` is "adamw" (Loshchilov and Hutter, 2019, arXiv:1711.05101), "adamw-8bit" (with moments of one byte; Dettmers
    et al., 2022, arXiv:2110.02861), "muon" (Jordan et al., 2024: one momentum for the matrices of the layers, AdamW for
    all else), "adafactor" (Shazeer and Stern, 2018, arXiv:1804.04235, without a first moment) or "sgd", whose momentum
    is `betas[0]`, kept where that is not 0.

    The rate climbs linearly over `warmup_steps`, then follows `schedule` down to `min_lr_ratio * lr` at the last step:
    "cosine", "linear", "constant" (stays), or "wsd" (warmup-stable-decay; Hu et al., 2024, arXiv:2404.06395: stays,
    then falls linearly over the last `decay_steps`). Norm weights and biases are not decayed.
    """

    kind: str = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    min_lr_ratio: float = 0.1

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of update `step` (0-based) in a run of `steps` updates."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        floor = self.lr * self.min_lr_ratio
        start = max(0, steps - max(2, self.decay_steps)) if self.schedule == "wsd" else self.warmup_steps
        last = steps - 1
        # Where the warm-up leaves a single step, that step is the decay. A run of one step has the full rate.
        progress = min(1.0, max(0.0, (step - start) / (last - start))) if start < last else float(start > 0)
        if self.schedule == "cosine":
            return floor + (self.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (self.lr - floor) * (1 - progress)


def state_bytes(optim: Optim, shape: Sequence[Any], itemsize: int, *, hidden: bool) -> Any:
    """Bytes that the optimizer keeps for a tensor of `shape`, whose own elements have `itemsize` bytes.

    Sizes are whole numbers, or numpy arrays of them for many shapes at once. `hidden`: the tensor belongs to a layer.
    Moments have the tensor's dtype, or float32 where it says so below; each tensor has a float32 step counter besides.
    Raises ConfigError when the optimizer is unknown.
    """
    numel, step = prod(shape), 4
    if optim.kind == "adamw":
        return 2 * itemsize * numel + step
    if optim.kind == "adamw-8bit":
        scales = 4 * -(-numel // BLOCK)
        return 2 * ((numel < SMALL) * 4 * numel + (numel >= SMALL) * (numel + scales)) + step
    if optim.kind == "muon":
        return (1 if hidden and len(shape) > 1 else 2) * itemsize * numel + step
    if optim.kind == "adafactor":
        # The mean square of each row and of each column of every matrix; of every element of what is none.
        *outer, rows, columns = shape if len(shape) > 1 else (1, *shape)
        return 4 * (prod(outer) * (rows + columns) if len(shape) > 1 else numel) + step
    if optim.kind == "sgd":
        return itemsize * numel if optim.betas[0] else 0
    raise ConfigError(f"optim.kind='{optim.kind}' is unknown; use {', '.join(KINDS)}")
