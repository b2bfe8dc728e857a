"""Settings of a process that trains on a GPU: the precision of float32 products, garbage collection, the record of
collectives.

Nothing here changes anything on a CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path

import torch

from kumi.accelerator import is_gpu
from kumi.launch.failure_causes import FLIGHT_RECORDER

# Steps between two collections of garbage. All ranks collect in the same step.
COLLECT_EVERY = 50
# The number of latest collectives that NCCL's flight recorder remembers: PyTorch's default.
_RECORDED = 2000


def record_collectives(folder: Path, environ: MutableMapping[str, str]) -> None:
    """Let NCCL write the last collectives of each rank to `folder` when one times out: `flight_recorder_<rank>`.

    The files say which collective a rank had not joined, and where in the program it was; PyTorch's `torchfrtrace`
    compares them. Variables that the user has set stay. Call it before the process groups are made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prefix = str(folder / FLIGHT_RECORDER)
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": str(_RECORDED),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,  # the name of TORCH_FR_DUMP_TEMP_FILE before PyTorch 2.12
    }.items():
        environ.setdefault(name, value)


def use_matmul_precision(device: torch.device, *, tf32: bool) -> None:
    """Let float32 products on a GPU be computed in TF32, or exactly."""
    if is_gpu(device):
        torch.set_float32_matmul_precision("high" if tf32 else "highest")


@contextmanager
def collect_together(device: torch.device) -> Iterator[None]:
    """A context in which a rank with a GPU collects garbage only in `collect_if_due`.

    By itself, Python collects after a number of allocations, so each rank would collect in another step, and the others
    would wait for it. Objects that exist at the beginning, such as the model, are not looked at again. Ranks on a CPU
    collect as usual: garbage there may hold memory that the next step needs.
    """
    if not is_gpu(device) or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_if_due(step: int) -> None:
    """Collect the garbage of the last steps, if `collect_together` is in effect and `step` is a multiple of
    COLLECT_EVERY."""
    if not gc.isenabled() and step % COLLECT_EVERY == 0:
        gc.collect()
