"""The options of the optimizer, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kumi.spec.field_docs import described

LR_SCHEDULES = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True)
class Optim:
    """An optimizer and its learning-rate schedule.

    `kind` is "adamw" (Loshchilov and Hutter, 2019, arXiv:1711.05101), "adamw-8bit" (moments of one byte; Dettmers et
    al., 2022, arXiv:2110.02861), "muon" (Jordan et al., 2024: momentum for the matrices of layers, AdamW for all other
    parameters), "adafactor" (Shazeer and Stern, 2018, arXiv:1804.04235, without a first moment) or "sgd" (the momentum
    is `betas[0]`, and has a state unless it is 0). `kumi.spec.optim_states` lists the states of each.

    The learning rate rises linearly over `warmup_steps`, then follows `schedule` down to `min_lr_ratio * lr` at the
    last step: "cosine", "linear", "constant" (no decay), or "wsd" (warmup-stable-decay; Hu et al., 2024,
    arXiv:2404.06395: constant, then linear over the last `decay_steps`). Norm weights and biases have no weight decay.
    """

    kind: str = described(
        "The optimizer; 'muon' updates embeddings, the head, norms and biases as 'adamw' does.", "adamw"
    )
    lr: float = described("Peak learning rate.", 3e-4)
    betas: tuple[float, float] = described(
        "Decay rates of the first and second moment; the first one is the momentum of 'muon' and 'sgd'.", (0.9, 0.95)
    )
    eps: float = described("Added to the denominator of the update of 'adamw' and 'adamw-8bit'.", 1e-8)
    weight_decay: float = described("Weight decay, decoupled except for 'sgd'; norms and biases are not decayed.", 0.1)
    grad_clip: float = described("Largest global gradient norm; 0 does not clip.", 1.0)
    schedule: str = described(
        "How the learning rate decays after the warm-up; 'wsd' holds it, then decays it over `decay_steps`.", "cosine"
    )
    warmup_steps: int = described(
        "Steps over which the learning rate rises from 0; if unset, `warmup_ratio` of the run.", 0
    )
    decay_steps: int = described("Last steps, over which 'wsd' decays; 0 means a tenth of the run.", 0)
    min_lr_ratio: float = described("Learning rate at the last step, relative to `lr`.", 0.1)

    def lr_at(self, step: int, steps: int) -> float:
        """Return the learning rate of update `step` (0-based) in a run of `steps` updates."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        floor = self.lr * self.min_lr_ratio
        start = max(0, steps - max(2, self.decay_steps)) if self.schedule == "wsd" else self.warmup_steps
        last = steps - 1
        # If the warmup leaves a single step, that step is the decay. A run of one step has the full rate.
        progress = min(1.0, max(0.0, (step - start) / (last - start))) if start < last else float(start > 0)
        if self.schedule == "cosine":
            return floor + (self.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (self.lr - floor) * (1 - progress)
