"""The optimizer over this rank's part of the parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from kumi.spec.optim import Optim


def init_adamw(named_parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim) -> torch.optim.AdamW:
    """AdamW over `named_parameters`, plain or sharded, with its states allocated and zero.

    Matrices are decayed; vectors (norm weights, biases) are not. States exist from the start so that a checkpoint
    before the first step is complete and memory does not grow during it. The learning rate is the caller's to set.
    """
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": optim.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
    )
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer
