"""Which cases benchmarks/gpu.py measures, the most important first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import shapes

SHAPES = {"1b": shapes.LLAMA_1B, "8b": shapes.LLAMA_8B, "tiny": shapes.TINY}


@dataclass(frozen=True)
class Case:
    """One training configuration on one device.

    `system` is "kumi" (bf16 compute, float32 master weights and states), "amp" (the bare loop under bf16 autocast, with
    float32 weights and states) or "bf16" (the bare loop with weights and states in bf16, which is half the memory and
    another numeric result). `layers` cuts the model where the whole does not fit. With `documents` > 1 every sequence
    holds that many documents that must not see one another; the bare loop cannot do that.
    """

    system: str
    shape: str
    microbatch: int
    recompute: str = "none"
    compile: bool = False
    layers: int | None = None
    seq_len: int = 4096
    documents: int = 1

    @property
    def name(self) -> str:
        """A readable name that is different for different cases."""
        parts = [self.system, self.shape if self.layers is None else f"{self.shape}/{self.layers} layers"]
        parts += [f"mb {self.microbatch}", f"recompute {self.recompute}"]
        parts += ["compile"] * self.compile
        parts += [f"{self.documents} documents"] if self.documents > 1 else []
        return ", ".join(parts)

    def config(self) -> dict:
        """The config.json of its model."""
        found = SHAPES[self.shape]
        return found if self.layers is None else shapes.with_layers(found, self.layers)


def all_cases() -> list[Case]:
    """Every case, most important first; what is to be compared stands together, so that it is measured in turn."""
    return [
        *_pair(Case("kumi", "1b", 4)),
        *_pair(Case("kumi", "1b", 4, compile=True)),
        *_pair(Case("kumi", "8b", 1, "full", layers=24)),
        *_pair(Case("kumi", "8b", 2, "full", layers=24, compile=True)),
        Case("kumi", "1b", 4, "selective"),
        *_pair(Case("kumi", "1b", 4, "full")),
        Case("kumi", "1b", 4, documents=8),
        *_pair(Case("kumi", "1b", 1)),
        *_pair(Case("kumi", "1b", 8)),
        # The whole model with float32 master weights: 16 bytes a parameter and more, on the edge of 141 GB.
        Case("kumi", "8b", 1, "full"),
        Case("bf16", "8b", 1, "full"),
        Case("kumi", "8b", 1, "selective", layers=16),
        *_pair(Case("kumi", "8b", 1, layers=16, compile=True)),
        Case("kumi", "1b", 4, "selective", compile=True),
        Case("bf16", "1b", 4, compile=True),
        *_pair(Case("kumi", "1b", 16, "full", compile=True)),
        *_pair(Case("kumi", "1b", 4)),
    ]


def _pair(case: Case) -> list[Case]:
    return [case, replace(case, system="amp")]


def tiny(case: Case) -> Case:
    """The same case with a shape that any machine runs at once."""
    return replace(case, shape="tiny", seq_len=64, layers=None if case.layers is None else 1)
