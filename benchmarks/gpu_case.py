"""Run one case of benchmarks/gpu.py in this process: build, warm up, measure, write a JSON file.

python benchmarks/gpu_case.py '{"system": "kumi", "shape": "1b", "microbatch": 4}' OUT.json [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import shapes
import torch
from gpu_cases import Case

GROUPS = 3


def kumi_step(case: Case, device: torch.device) -> tuple[Callable[[], torch.Tensor], int]:
    """Return kumi's train step on random weights, and its estimate of the peak memory in bytes."""
    from kumi.spec.layout import Layout
    from kumi.train.step import StepBatch, train_step
    from kumi.train.train_state import TrainState
    from kumi.validation.random_run import make_rank_state, synthetic

    parts = make_rank_state(
        case.config(),
        device,
        seq_len=case.seq_len,
        microbatch=case.microbatch,
        recompute=case.recompute,
        compile=case.compile,
        precision="bf16",
        layout=Layout(**case.layout),
        microbatches=case.microbatches,
        async_tp=case.async_tp,
    )
    batch = synthetic(case.microbatch * case.microbatches, case.seq_len, case.config()["vocab_size"], case.documents)
    tokens = int(np.count_nonzero(batch["labels"] >= 0)) * parts.run.layout.dp
    counts = StepBatch(batch, tokens, tokens, None, 0.0)
    state = TrainState()
    return (lambda: train_step(parts, state, counts, None).loss), parts.run.memory.total - parts.run.memory.reserved


def bare_step(case: Case, device: torch.device) -> tuple[Callable[[], torch.Tensor], None]:
    """Return the bare loop's step on random weights."""
    import bare_loop

    args = argparse.Namespace(
        dtype=case.system,
        device=device.type,
        random=True,
        recompute=case.recompute == "full",
        packed=False,
        batches=None,
        microbatch=case.microbatch,
        seq_len=case.seq_len,
        lr=3e-4,
    )
    with TemporaryDirectory() as folder:
        args.model = shapes.write_config(case.config(), Path(folder))
        model = bare_loop.load_model(args)
    optimizer = bare_loop.make_optimizer(args, model)
    batch = bare_loop.Batches(args, case.config()["vocab_size"], rank=0, world=1)(0)
    if case.compile:  # layer by layer, as kumi does: compiling the model as one graph takes minutes
        for layer in model.model.layers.values():
            layer.compile()
    return (lambda: bare_loop.train_step(args, model, optimizer, batch)), None


def timed(step: Callable[[], torch.Tensor], device: torch.device, seconds: float) -> dict:
    """Return seconds a step after a warm-up: the median and the range of a few groups of steps."""
    began = time.perf_counter()
    first_loss = step().item()
    first = time.perf_counter() - began
    step().item()
    began = time.perf_counter()
    step().item()
    size = max_over_ranks(max(1, round(seconds / GROUPS / max(time.perf_counter() - began, 1e-6))))
    groups = []
    for _ in range(GROUPS):
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


def max_over_ranks(steps: int) -> int:
    """Return the largest value of all ranks, so that they run equally many steps."""
    if torch.distributed.is_initialized():
        most = torch.tensor(steps)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return int(most)
    return steps


def memory(device: torch.device) -> dict:
    """Return peak bytes of tensors, and of the allocator's reserved memory."""
    if device.type != "cuda":
        return {"peak_bytes": None, "reserved_bytes": None}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def run(case: Case, device: torch.device, seconds: float = 3.0) -> dict:
    """Return the measurements of `case`; running out of memory is a result, too."""
    from kumi.spec import families, ledger
    from kumi.spec.layout import Layout

    torch.manual_seed(0)
    spec, layout = families.from_hf(case.config()), Layout(**case.layout)
    tokens = case.microbatch * case.microbatches * layout.dp * case.seq_len
    flops = ledger.train_flops(spec, tokens, case.seq_len)
    result = {
        "status": "ok",
        "parameters": ledger.num_params(spec),
        "tokens": tokens,
        "flops": flops,
        "estimated_bytes": None,
    }
    try:
        began = time.perf_counter()
        step, result["estimated_bytes"] = (kumi_step if case.system == "kumi" else bare_step)(case, device)
        result["build_s"] = time.perf_counter() - began
        result |= timed(step, device, seconds)
        result |= {"tokens_per_s": tokens / result["step_s"], "flops_per_s": flops / result["step_s"]}
    except torch.OutOfMemoryError as error:
        result |= {"status": "out of memory", "reason": str(error).splitlines()[0]}
    return result | memory(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("case", help="the fields of gpu_cases.Case as JSON")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for the measured steps")
    args = parser.parse_args()
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", "0"))) if args.device == "cuda" else "cpu"
    result = run(Case(**json.loads(args.case)), torch.device(device), args.seconds)
    if os.environ.get("RANK", "0") == "0":
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
