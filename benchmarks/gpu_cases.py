"""The cases of benchmarks/gpu.py, the most important first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import shapes

SHAPES = {
    "1b": shapes.LLAMA_1B,
    "8b": shapes.LLAMA_8B,
    "30b-a3b": shapes.QWEN_30B_A3B,
    "tiny": shapes.TINY,
    "tiny-experts": shapes.TINY_EXPERTS,
}


@dataclass(frozen=True)
class Case:
    """One training configuration on one device, or on as many as its `layout` has ranks.

    `system` is "kumi" (bf16 compute, float32 master weights and states), "amp" (the bare loop under bf16 autocast, with
    float32 weights and states) or "bf16" (the bare loop with weights and states in bf16, which is half the memory and
    another numeric result). "titan" is torchtitan as it is on one device (float32 weights and states, bf16 autocast),
    "titan-fsdp" with the mixed precision that it has on several. `layers` and `vocabulary` cut a model; the script cuts
    further what does not fit the card. With `documents` > 1 every sequence has that many documents without attention
    between them; the bare loop and torchtitan's do not support that. `layout` has fields
    of kumi's Layout; a rank then has `microbatches` a step, and with `async_tp` overlaps matmuls with messages.
    """

    system: str
    shape: str
    microbatch: int
    recompute: str = "none"
    compile: bool = False
    layers: int | None = None
    vocabulary: int | None = None
    seq_len: int = 4096
    documents: int = 1
    layout: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    async_tp: bool = False

    @property
    def ranks(self) -> int:
        """The number of devices."""
        return prod(self.layout.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))

    @property
    def name(self) -> str:
        """A readable name that is different for different cases."""
        parts = [self.system, self.shape if self.layers is None else f"{self.shape}/{self.layers} layers"]
        parts += [f"mb {self.microbatch}", f"recompute {self.recompute}"]
        parts += [f"seq {self.seq_len}"] * (self.seq_len != 4096)
        parts += ["compile"] * self.compile
        parts += [f"{self.documents} documents"] if self.documents > 1 else []
        parts += [" ".join(f"{key} {value}" for key, value in self.layout.items())] if self.layout else []
        parts += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        parts += ["async tp"] * self.async_tp
        return ", ".join(parts)

    def config(self) -> dict:
        """The config.json of the model."""
        shape = SHAPES[self.shape]
        shape = shape if self.layers is None else shapes.with_layers(shape, self.layers)
        return shape if self.vocabulary is None else shape | {"vocab_size": self.vocabulary}


def all_cases() -> list[Case]:
    """Return every case, the most important first; cases to compare are neighbours, so they are measured in turn."""
    return [
        *_pair(Case("kumi", "1b", 4)),
        *_pair(Case("kumi", "1b", 4, compile=True)),
        *_pair(Case("kumi", "8b", 1, "full", layers=24)),
        *_pair(Case("kumi", "8b", 2, "full", layers=24, compile=True)),
        *beside_titan(),
        Case("kumi", "1b", 4, "selective"),
        *_pair(Case("kumi", "1b", 4, "full")),
        Case("kumi", "1b", 4, documents=8),
        Case("kumi", "30b-a3b", 1, layers=4),
        Case("kumi", "30b-a3b", 4, "selective", layers=4),
        *on_several(),
        *_pair(Case("kumi", "1b", 1)),
        *_pair(Case("kumi", "1b", 8)),
        # The full model with float32 master weights: 16 bytes a parameter and more, if the card has 141 GB.
        Case("kumi", "8b", 1, "full"),
        Case("bf16", "8b", 1, "full"),
        Case("kumi", "8b", 1, "selective", layers=16),
        *_pair(Case("kumi", "8b", 1, layers=16, compile=True)),
        Case("kumi", "1b", 4, "selective", compile=True),
        Case("bf16", "1b", 4, compile=True),
        *_pair(Case("kumi", "1b", 16, "full", compile=True)),
        *_pair(Case("kumi", "1b", 4)),
    ]


def beside_titan() -> list[Case]:
    """Return cases of torchtitan beside kumi's and the bare loop's.

    Those of the 8B shape have the 8192 tokens of torchtitan's published figures, and so few layers that its complete
    logits fit 80 GB, too.
    """
    large = Case("kumi", "8b", 1, layers=8, seq_len=8192, compile=True)
    full, selective = replace(large, recompute="full"), replace(large, recompute="selective")
    return [
        *(replace(Case("titan", "1b", 4), compile=compiled) for compiled in (False, True)),
        *_pair(full),
        *(replace(full, system=system) for system in ("titan", "titan-fsdp")),
        selective,
        *(replace(selective, system=system) for system in ("titan", "titan-fsdp")),
    ]


def on_several() -> list[Case]:
    """Return cases of every axis on two GPUs, the same work on one, and two layouts that need four."""
    dense, experts = Case("kumi", "8b", 1, "full", layers=8), Case("kumi", "30b-a3b", 1, layers=4)
    of_dense: list[dict[str, Any]] = [
        {"dp_shard": 2, "zero": 3},
        {"tp": 2},
        {"cp": 2, "zero": 1},
        {"cp": 2, "zero": 1, "context": "ulysses"},
        {"tp": 2, "dp_shard": 2, "zero": 3},
    ]
    piped: list[dict[str, Any]] = [{"pp": 2}, {"pp": 2, "schedule": "zb-v", "stages": 2}, {"pp": 2, "tp": 2}]
    return [
        dense,
        *(replace(dense, layout=layout) for layout in of_dense),
        replace(dense, layout={"tp": 2}, async_tp=True),
        *(replace(dense, layout=layout, microbatches=8) for layout in piped),
        replace(experts, layout={"dp_shard": 2, "ep": 2, "zero": 1}),
        replace(experts, layout={"dp_shard": 4, "ep": 4, "zero": 1}),
    ]


def _pair(case: Case) -> list[Case]:
    return [case, replace(case, system="amp")]


def tiny(case: Case) -> Case:
    """Return the case with a shape that any machine runs at once."""
    shape = "tiny-experts" if case.shape == "30b-a3b" else "tiny"
    layers = None if case.layers is None else case.layout.get("pp", 1) * case.layout.get("stages", 1)
    return replace(case, shape=shape, seq_len=64, layers=layers)
