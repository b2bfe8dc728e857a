"""The optimizer and the learning rate of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULES = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True)
class Optim:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) and its learning-rate schedule.

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

    # Moments kept for each parameter, in its dtype; each tensor has a float32 step counter besides.
    moments = 2

    def lr_at(self, step: int, steps: int) -> float:
        """Learning rate of update `step` (0-based) in a run of `steps` updates."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        floor = self.lr * self.min_lr_ratio
        start = max(0, steps - max(2, self.decay_steps)) if self.schedule == "wsd" else self.warmup_steps
        progress = min(1.0, max(0.0, (step - start) / max(1, steps - 1 - start)))
        if self.schedule == "cosine":
            return floor + (self.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (self.lr - floor) * (1 - progress)
