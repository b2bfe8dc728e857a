"""Measurements as plain data, without torch, so that they can be read, fitted and shown without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """The seconds of a kernel for `amount` FLOPs or bytes, mean over the ranks.

    `kind`, `dtype`: the kind of kernel (see `time_kernels.Kernel`), and the dtype of the computation.
    `what`: the shape or variant, for display.
    `tokens`: the tokens of a document, for attention. `rows`: the rows of the products that read weights.
    """

    kind: str
    dtype: str
    what: str
    amount: float
    seconds: float
    tokens: int = 0
    rows: int = 0

    @property
    def rate(self) -> float:
        """FLOP/s or bytes/s."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class Transfer:
    """The seconds of a collective over `degree` ranks, on the slowest rank.

    `kind`: such as "all_reduce" (see `time_collectives.KINDS`). `size`: bytes of the full tensor.
    """

    kind: str
    degree: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Measurements:
    """All measurements of a machine.

    `kernels`, `transfers`: the timed kernels and collectives.
    `reserved`: bytes of a rank before it allocates a tensor.
    `processors`: multiprocessors of the device, 0 on a CPU.
    `threads`: CPU threads of a rank.
    `torch`: the version of torch.
    `numerics`: how a CPU computed (see `kumi.spec.numerics`), empty on a GPU.
    """

    kernels: tuple[Timing, ...]
    transfers: tuple[Transfer, ...]
    reserved: int
    processors: int
    threads: int
    torch: str
    numerics: str = ""

    def of(self, kind: str, dtype: str | None = None) -> list[Timing]:
        """Return the kernels of `kind`, in `dtype` or in all dtypes."""
        return [timing for timing in self.kernels if timing.kind == kind and dtype in (None, timing.dtype)]


def read_measurements(written: dict[str, Any]) -> Measurements:
    """Return the measurements in the JSON object that a rank wrote."""
    kernels = tuple(Timing(**item) for item in written["kernels"])
    transfers = tuple(Transfer(**item) for item in written["transfers"])
    return Measurements(**{**written, "kernels": kernels, "transfers": transfers})


def rate(kernels: Iterable[Timing]) -> float:
    """Return the FLOP/s or bytes/s of `kernels` run one after another."""
    timings = list(kernels)
    return sum(timing.amount for timing in timings) / sum(timing.seconds for timing in timings)
