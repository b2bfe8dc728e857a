"""Run one case of benchmarks/gpu.py in this process: build, warm up, measure, write a JSON file.

python benchmarks/gpu_case.py '{"system": "kumi", "shape": "1b", "microbatch": 4}' OUT.json [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import shapes
import torch
from gpu_cases import Case

from kumi.spec import families, ledger
from kumi.spec.layout import Layout
from kumi.validation.fitting_case import SHARE, StepCase, fitted, free_bytes
from kumi.validation.random_run import synthetic
from kumi.validation.timed_step import memory_peaks, prepared, timed


def step_case(case: Case) -> StepCase:
    """Return the case as kumi's validation describes steps."""
    return StepCase(
        case.config(),
        seq_len=case.seq_len,
        microbatch=case.microbatch,
        recompute=case.recompute,
        compile=case.compile,
        documents=case.documents,
        layout=Layout(**case.layout),
        microbatches=case.microbatches,
        async_tp=case.async_tp,
    )


def fit(case: Case, room: float) -> Case | None:
    """Return `case` with sizes that fit `room` bytes by kumi's estimate, the same for every system; None if none do."""
    sized = fitted(step_case(case), room)
    if sized is None:
        return None
    vocabulary = sized.config["vocab_size"]
    return replace(
        case,
        layers=sized.layers or case.layers,
        vocabulary=vocabulary,
        microbatch=sized.microbatch,
        seq_len=sized.seq_len,
    )


def kumi_step(case: Case, device: torch.device) -> tuple[Callable[[], torch.Tensor], int]:
    """Return kumi's train step on random weights, and its estimate of the peak memory in bytes."""
    step = prepared(step_case(case), device)
    return step, step.estimate


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
        for layer in model.model.layers.children():
            layer.compile()
    return (lambda: bare_loop.train_step(args, model, optimizer, batch)), None


def titan_step(case: Case, device: torch.device) -> tuple[Callable[[], torch.Tensor], None]:
    """Return torchtitan's train step on random weights and the tokens of kumi's step."""
    from titan_step import TitanStep

    config = case.config()
    batch = synthetic(case.microbatch, case.seq_len, config["vocab_size"], documents=1)
    tokens = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["labels"])
    fsdp = case.system == "titan-fsdp"
    return TitanStep(config, tokens, device, recompute=case.recompute, compile=case.compile, fsdp=fsdp), None


def make_step(case: Case, device: torch.device) -> tuple[Callable[[], torch.Tensor], int | None]:
    """Return the train step of the case's system, and kumi's estimate of its memory if it is kumi."""
    if case.system == "kumi":
        return kumi_step(case, device)
    return titan_step(case, device) if case.system.startswith("titan") else bare_step(case, device)


def max_over_ranks(steps: int) -> int:
    """Return the largest value of all ranks, so that they run equally many steps."""
    if torch.distributed.is_initialized():
        most = torch.tensor(steps)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return int(most)
    return steps


def run(case: Case, device: torch.device, seconds: float = 3.0) -> dict:
    """Return the measurements of `case`; running out of memory is a result, too."""
    torch.manual_seed(0)
    if device.type == "cuda":
        sized = fit(case, SHARE * free_bytes(device))
        if sized is None:
            return {"status": "too large", "reason": "no size fits the free memory"}
        case = sized
    spec, layout = families.from_hf(case.config()), Layout(**case.layout)
    tokens = case.microbatch * case.microbatches * layout.dp * case.seq_len
    flops = ledger.train_flops(spec, tokens, case.seq_len)
    result = {
        "status": "ok",
        "sizes": step_case(case).sizes,
        "parameters": ledger.num_params(spec),
        "tokens": tokens,
        "flops": flops,
        "estimated_bytes": None,
    }
    try:
        began = time.perf_counter()
        step, result["estimated_bytes"] = make_step(case, device)
        result["build_s"] = time.perf_counter() - began
        result |= timed(step, device, seconds, max_over_ranks)
        result |= {"tokens_per_s": tokens / result["step_s"], "flops_per_s": flops / result["step_s"]}
    except torch.OutOfMemoryError as error:
        result |= {"status": "out of memory", "reason": str(error).splitlines()[0]}
    return result | memory_peaks(device)


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
