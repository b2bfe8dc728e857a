"""Training steps whose sizes fit the free memory of a device, whatever card it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kumi.accelerator import is_gpu
from kumi.process_limits import free_memory
from kumi.spec.layout import Layout
from kumi.spec.lora import Lora
from kumi.units import format_count
from kumi.validation.model_shapes import TINY, TINY_EXPERTS
from kumi.validation.random_run import make_run

# A step whose estimate is at most this share of the free memory fits: estimates are within 20 %.
SHARE = 0.8
# The smallest sizes that still say something about a model's layers.
_LEAST_VOCABULARY, _LEAST_TOKENS = 16384, 2048


@dataclass(frozen=True)
class StepCase:
    """A model's shape, and how it is trained. `layers`: None for all of the shape's."""

    config: dict[str, Any]
    layers: int | None = None
    seq_len: int = 8192
    microbatch: int = 1
    recompute: str = "none"
    compile: bool = False
    precision: str = "bf16"
    documents: int = 1
    lora: Lora | None = None
    layout: Layout = field(default_factory=Layout)
    microbatches: int = 1
    async_tp: bool = False

    @property
    def model(self) -> dict[str, Any]:
        """The config.json of the model."""
        return self.config if self.layers is None else self.config | {"num_hidden_layers": self.layers}

    @property
    def tokens(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.microbatch * self.microbatches * self.seq_len * self.layout.dp

    @property
    def run_options(self) -> dict[str, Any]:
        """The arguments of `kumi.validation.random_run.make_run`."""
        names = ("seq_len", "microbatch", "recompute", "compile", "precision", "layout", "microbatches", "async_tp")
        return {name: getattr(self, name) for name in names} | {"lora": self.lora}

    @property
    def sizes(self) -> str:
        """The sizes in words."""
        layers, vocabulary = self.model["num_hidden_layers"], format_count(self.model["vocab_size"])
        rows = f"{self.microbatch} x {self.seq_len} tokens"
        return f"{layers} layers, vocabulary {vocabulary}, {rows}"


def estimated_bytes(case: StepCase) -> int:
    """Return the planner's estimate of the memory of the fullest rank, without what it reserves for libraries."""
    memory = make_run(case.model, **case.run_options).memory
    return int(memory.total - memory.reserved)


def fitted(case: StepCase, room: float) -> StepCase | None:
    """Return `case` with sizes that need at most `room` bytes; None if nothing fits.

    While two layers do not fit, the vocabulary is halved, then the rows, then the tokens. Then come as many layers as
    fit.
    """
    if estimated_bytes(case) <= room:
        return case
    while case.model["vocab_size"] // 2 >= _LEAST_VOCABULARY and estimated_bytes(replace(case, layers=2)) > room:
        case = replace(case, config=case.config | {"vocab_size": case.model["vocab_size"] // 2})
    while case.microbatch > 1 and estimated_bytes(replace(case, layers=2)) > room:
        case = replace(case, microbatch=case.microbatch // 2)
    while case.seq_len // 2 >= _LEAST_TOKENS and estimated_bytes(replace(case, layers=2)) > room:
        case = replace(case, seq_len=case.seq_len // 2)
    fits, over = 0, case.model["num_hidden_layers"] + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        fits, over = (middle, over) if estimated_bytes(replace(case, layers=middle)) <= room else (fits, middle)
    return replace(case, layers=fits) if fits else None


def free_bytes(device: torch.device) -> int:
    """Return the memory of `device` that no process has taken; 0 where the system does not tell."""
    return torch.cuda.mem_get_info(device)[0] if is_gpu(device) else free_memory() or 0


def tiny(case: StepCase) -> StepCase:
    """Return `case` with a tiny model and short rows, so that any machine trains a step in a moment."""
    config = TINY_EXPERTS if "num_experts" in case.config else TINY
    layers = case.layout.pp * case.layout.stages if case.layout.pp > 1 else None
    return replace(case, config=config, layers=layers, seq_len=64)
