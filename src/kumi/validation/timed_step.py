"""Time training steps on random weights and tokens: kumi's step, and that of the plain loop (`plain_llama`)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kumi.accelerator import is_gpu
from kumi.bench.clock import synchronize
from kumi.config.numerics import chosen_of, read_cached_numerics, this_gpu
from kumi.nn.numerics import use_kernels
from kumi.spec import ledger
from kumi.train.process_memory import is_out_of_memory
from kumi.train.step import StepBatch, train_step
from kumi.train.train_state import RankState, TrainState
from kumi.validation.fitting_case import StepCase
from kumi.validation.part import Row, Setting, Skipped, Value
from kumi.validation.plain_llama import make_plain_step
from kumi.validation.random_run import make_rank_state, synthetic, this_cluster

# Groups of steps that are timed one after the other.
GROUPS = 3
Step = Callable[[], Tensor]


def validated_device(setting: Setting) -> torch.device:
    """Return the device of a part. Raise Skipped if torch finds none of the kind."""
    torch.manual_seed(0)
    if setting.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Skipped(
            "torch finds no GPU here: its build has no CUDA or ROCm, the driver is too old for it, or the GPU is in "
            "use by another process in exclusive compute mode"
        )
    return torch.device("cuda", 0)


@dataclass
class PreparedStep:
    """kumi's training step of a case, ready to be called."""

    case: StepCase
    rank_state: RankState
    batch: StepBatch
    state: TrainState

    def __call__(self) -> Tensor:
        """Train a step, and return its loss."""
        return train_step(self.rank_state, self.state, self.batch, None).loss

    @property
    def estimate(self) -> int:
        """The planner's estimate of the memory, in bytes, without what it reserves for libraries."""
        memory = self.rank_state.run.memory
        return int(memory.total - memory.reserved)


def prepared(case: StepCase, device: torch.device) -> PreparedStep:
    """Return kumi's training step of `case` on random weights and tokens, with the kernels that runs use here."""
    if is_gpu(device):
        use_kernels(_kernels_of_runs(device))
    rank_state = make_rank_state(case.model, device, **case.run_options)
    rows = case.microbatch * case.microbatches
    batch = synthetic(rows, case.seq_len, case.model["vocab_size"], case.documents)
    tokens = int(np.count_nonzero(batch["labels"] >= 0)) * case.layout.dp
    return PreparedStep(case, rank_state, StepBatch(batch, tokens, tokens, None, 0.0), TrainState())


def _kernels_of_runs(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return the kernels that were chosen for this GPU by measurement; none if they have not been measured."""
    chosen = chosen_of(read_cached_numerics(this_gpu(torch.cuda.get_device_name(device))), asked=())
    return () if chosen is None else chosen.kernels


def timed(step: Step, device: torch.device, seconds: float, agree: Callable[[int], int] = int) -> dict[str, Any]:
    """Return seconds a step after a warm-up, and losses: the median and the range of a few groups of steps.

    `agree`: returns a number of steps that is the same on all ranks, given this rank's number.
    """
    began = time.perf_counter()
    first_loss = step().item()
    first = time.perf_counter() - began
    step().item()
    began = time.perf_counter()
    step().item()
    size = agree(max(1, round(seconds / GROUPS / max(time.perf_counter() - began, 1e-6))))
    groups = []
    for _ in range(GROUPS):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(size):
            loss = step()
        last_loss = loss.item()  # waits for the device
        groups.append((time.perf_counter() - began) / size)
    return {
        "step_s": median(groups),
        "step_s_range": [min(groups), max(groups)],
        "steps": GROUPS * size,
        "first_step_s": first,
        "first_loss": first_loss,
        "last_loss": last_loss,
    }


def memory_peaks(device: torch.device) -> dict[str, int | None]:
    """Return peak bytes of tensors, and of the allocator's reserved memory; None on a CPU."""
    if not is_gpu(device):
        return {"peak_bytes": None, "reserved_bytes": None}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def peak_flops() -> float | None:
    """Return the data sheet's FLOP/s of this machine's device in bfloat16; None if no preset has them."""
    return this_cluster().device.peak_flops("bfloat16")


@contextmanager
def fresh(device: torch.device) -> Iterator[None]:
    """A context whose tensors and compiled code are given back afterwards, and whose memory peaks are its own."""
    gc.collect()
    if is_gpu(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    finally:
        torch.compiler.reset()


def measured_row(what: str, case: StepCase, device: torch.device, seconds: float, *, plain: bool = False) -> Row:
    """Return the row of a case: speed, losses and memory. Running out of memory is a result, too.

    `plain`: of the plain loop, with the same shape and precision.
    """
    row: dict[str, Value] = {"what": what, "sizes": case.sizes}
    with fresh(device):
        try:
            estimate = None
            if plain:
                step: Step = make_plain_step(case, device)
            else:
                prepared_step = prepared(case, device)
                step, estimate = prepared_step, prepared_step.estimate
            times = timed(step, device, seconds)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return {**row, "what": f"{what}: out of memory", **_memory_row(device, None)}
        row |= {
            "tokens/s": case.tokens / times["step_s"],
            **_utilisation(case, times["step_s"], device),
            "step, ms": 1e3 * times["step_s"],
            "spread, %": 100 * (times["step_s_range"][1] / times["step_s_range"][0] - 1),
            "first step, s": times["first_step_s"],
            "losses": f"{times['first_loss']:.4f} to {times['last_loss']:.4f} in {times['steps'] + 3} steps",
            **_memory_row(device, estimate),
        }
    return row


def _utilisation(case: StepCase, seconds: float, device: torch.device) -> Row:
    """Return the model FLOPs utilisation, where a data sheet has the peak."""
    peak = peak_flops() if is_gpu(device) else None
    if peak is None or case.lora is not None:
        return {}
    flops = ledger.train_flops(_spec(case), case.tokens, case.seq_len)
    return {"MFU, %": 100 * flops / seconds / peak / case.layout.world_size}


def _spec(case: StepCase) -> Any:
    from kumi.spec import families

    return families.from_hf(case.model)


def _memory_row(device: torch.device, estimate: int | None) -> Row:
    if not is_gpu(device):
        return {}
    peaks = memory_peaks(device)
    return {
        "tensors, GiB": (peaks["peak_bytes"] or 0) / 2**30,
        "reserved, GiB": (peaks["reserved_bytes"] or 0) / 2**30,
        "estimated, GiB": None if estimate is None else estimate / 2**30,
    }
