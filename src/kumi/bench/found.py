"""What was measured, as plain data: no torch here, so that it can be read, fitted and shown without."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """A kernel's `seconds` for `amount` FLOPs or bytes; see `kumi.bench.kernels.Kernel`. The mean over the ranks."""

    kind: str
    dtype: str
    what: str
    amount: float
    seconds: float

    @property
    def rate(self) -> float:
        """FLOP/s or bytes/s."""
        return self.amount / self.seconds


@dataclass(frozen=True)
class Transfer:
    """`seconds` of a collective of `kind` over `size` bytes among `degree` ranks; see `kumi.bench.collectives`."""

    kind: str
    degree: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Found:
    """All measurements; bytes that a rank holds before any tensor; the device's processors (0 on a CPU), the threads
    a rank computes with, torch's version, and how a CPU computed (see `kumi.spec.numerics`)."""

    kernels: tuple[Timing, ...]
    transfers: tuple[Transfer, ...]
    reserved: int
    processors: int
    threads: int
    torch: str
    numerics: str = ""

    def of(self, kind: str, dtype: str | None = None) -> list[Timing]:
        """The kernels of `kind`, in `dtype` or in all."""
        return [one for one in self.kernels if one.kind == kind and dtype in (None, one.dtype)]


def read_found(written: dict[str, Any]) -> Found:
    """`Found` from the JSON object that a rank wrote."""
    kernels = tuple(Timing(**one) for one in written["kernels"])
    transfers = tuple(Transfer(**one) for one in written["transfers"])
    return Found(**{**written, "kernels": kernels, "transfers": transfers})


def rate(kernels: Iterable[Timing]) -> float:
    """FLOP/s or bytes/s of `kernels` done one after another."""
    listed = list(kernels)
    return sum(one.amount for one in listed) / sum(one.seconds for one in listed)
