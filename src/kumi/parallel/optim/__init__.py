"""Optimizers over this rank's shards of the parameters, in any layout.

    optimizer = build_optimizer(model, mesh, optim)     # model: a result of kumi.parallel.build
    optimizer.step()                                    # all ranks together: an update may communicate

A kind of optimizer is a file of this package and a line in `OPTIMIZERS`; its states are a line in
`kumi.spec.optim_states.STATES`. `adamw`: AdamW on the device. `host_adamw`: AdamW on the host, with states in memory or
on drives (`nvme_store`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.adafactor import build_adafactor
from kumi.parallel.optim.adamw_8bit import build_adamw_8bit
from kumi.parallel.optim.host_adamw import build_adamw
from kumi.parallel.optim.muon import build_muon
from kumi.parallel.optim.optimizer import Optimizer, TrainedParams, trained_parameters
from kumi.parallel.optim.sgd import build_sgd
from kumi.spec.optim import Optim

OPTIMIZERS: Mapping[str, Callable[[TrainedParams], Optimizer]] = {
    "adamw": build_adamw,
    "adamw-8bit": build_adamw_8bit,
    "muon": build_muon,
    "adafactor": build_adafactor,
    "sgd": build_sgd,
}


def build_optimizer(model: nn.Module, mesh: Mesh, optim: Optim, folder: Path | None = None) -> Optimizer:
    """Return the optimizer `optim` over the trained parameters of `model`, with its states allocated and zero.

    `folder`: where states are if the layout keeps them on drives. Raise SaveError if the drives have no room.
    """
    return OPTIMIZERS[optim.kind](trained_parameters(model, optim, mesh, folder))
