"""Compare estimates of generation with published throughputs.

    python benchmarks/decode_published.py [--json FILE]

- gpt-fast: README of github.com/pytorch-labs/gpt-fast at commit 0f925b5, and for Mixtral 8x7B a later one: tokens a
  second of one sequence after a short prompt, on A100 80GB limited to 330 W. `READ_SHARE` of
  kumi.plan.inference.decode_step is fitted to these rows.
- TensorRT-LLM 0.6.1: docs/source/performance.md of github.com/NVIDIA/TensorRT-LLM at commit 138f96d: output tokens a
  second of a GPU, over prompts and replies of a batch of equal lengths; float16 on A100, float8 weights and caches on
  H100. All its rows of LLaMA are here; kumi has no GPT-J, and the table does not say which Falcon 180B it ran.

- TensorRT-LLM 1.0: docs/source/performance/perf-overview.md at commit 00f3768: output tokens a second under as many
  requests as there is memory for, float8 weights and caches. The batch is not in the table: it is the largest that fits
  in 95 % of the memory, at most their default of 2,048. All rows of Llama on one GPU without float4 are here.

Nothing is fitted to TensorRT-LLM. Version 0.6.1 has no kernel for grouped-query attention of many query heads: that of
0.8 is 2.4 times as fast with LLaMA 70B, 128 + 2048 tokens (docs/source/blogs/XQA-kernel.md). The rows of 70B with long
replies (marked *) measure that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean

import numpy as np

from kumi.config import plan_input
from kumi.config.model_plan import parse_gpus, plan_of_model
from kumi.plan.inference.decode_step import decode_step
from kumi.plan.inference.inference_job import InferenceJob
from kumi.plan.inference.inference_memory import largest_batch
from kumi.plan.inference.rollout_time import rollout_time
from kumi.spec.divisibility import divisibility
from kumi.spec.layout import Layout

MODELS = Path(__file__).parents[1] / "examples" / "models"


@dataclass(frozen=True)
class Published:
    """A published row: `rate` is in output tokens per second of a GPU, or of all GPUs in gpt-fast's table."""

    source: str
    model: str
    gpu: str
    tp: int
    batch: int
    prompt: int
    reply: int
    rate: float
    ungrouped: bool = False

    @property
    def narrow(self) -> bool:
        """True for weights and caches in float8."""
        return self.source != "gpt-fast" and self.gpu != A100


def _gpt_fast(model: str, tp: int, rate: float) -> Published:
    # The README says a prompt of 5 tokens; the script generates 200 by default.
    return Published("gpt-fast", model, "a100-sxm-80gb", tp, 1, 5, 200, rate)


def _trt(
    gpu: str, model: str, batch: int, tp: int, prompt: int, reply: int, rate: float, *, ungrouped: bool = False
) -> Published:
    return Published("TensorRT-LLM 0.6.1", model, gpu, tp, batch, prompt, reply, rate, ungrouped)


A100, H100, H200 = "a100-sxm-80gb", "h100-sxm", "h200-sxm"
# Tokens of prompt and reply, and output tokens a second of Llama 3.1 8B on H100 and H200 and of Llama 3.3 70B on H200.
_MAXIMUM = (
    (128, 128, 28312, 27911, 3803),
    (128, 2048, 22714, 26221, 4336),
    (128, 4096, 14325, 18027, 2872),
    (500, 2000, 17660, 20770, 3666),
    (1000, 1000, 15220, 17744, 2909),
    (1000, 2000, 13899, 16828, 2994),
    (2048, 128, 3450, 3538, 442),
    (2048, 2048, 9305, 12194, 2003),
    (5000, 500, 3459, 3902, 566),
    (20000, 2000, 1351, 1804, 283),
)
_SHAPES = (("llama-3.1-8b", H100), ("llama-3.1-8b", H200), ("llama-3-70b", H200))


def _maximum() -> Iterator[Published]:
    for index, (model, gpu) in enumerate(_SHAPES):
        for prompt, reply, *rates in _MAXIMUM:
            yield Published("TensorRT-LLM 1.0", model, gpu, 1, 0, prompt, reply, rates[index])


ROWS = (
    _gpt_fast("llama-2-7b", 1, 104.9),
    _gpt_fast("llama-2-7b", 2, 168.84),
    _gpt_fast("llama-2-7b", 4, 254.02),
    _gpt_fast("llama-2-7b", 8, 328.43),
    _gpt_fast("llama-2-70b", 2, 21.32),
    _gpt_fast("llama-2-70b", 4, 38.01),
    _gpt_fast("llama-2-70b", 8, 62.50),
    _gpt_fast("mixtral-8x7b", 2, 96.67),
    _gpt_fast("mixtral-8x7b", 4, 155.35),
    _gpt_fast("mixtral-8x7b", 8, 227.82),
    _trt(A100, "llama-2-7b", 384, 1, 128, 128, 5586),
    _trt(A100, "llama-2-7b", 60, 1, 128, 2048, 1928),
    _trt(A100, "llama-2-7b", 52, 1, 2048, 128, 591),
    _trt(A100, "llama-2-7b", 64, 2, 2048, 2048, 782),
    _trt(A100, "llama-2-70b", 1280, 4, 128, 128, 670),
    _trt(A100, "llama-2-70b", 240, 4, 128, 2048, 525, ungrouped=True),
    _trt(A100, "llama-2-70b", 120, 4, 2048, 128, 79),
    _trt(H100, "llama-2-7b", 768, 1, 128, 128, 19694),
    _trt(H100, "llama-2-7b", 112, 1, 128, 2048, 6818),
    _trt(H100, "llama-2-7b", 80, 1, 2048, 128, 2244),
    _trt(H100, "llama-2-7b", 48, 1, 2048, 2048, 2740),
    _trt(H100, "llama-2-70b", 1024, 2, 128, 128, 2657),
    _trt(H100, "llama-2-70b", 480, 4, 128, 2048, 1486, ungrouped=True),
    _trt(H100, "llama-2-70b", 96, 2, 2048, 128, 306),
    _trt(H100, "llama-2-70b", 64, 2, 2048, 2048, 547, ungrouped=True),
    *_maximum(),
)


def predicted_rate(row: Published) -> float:
    """Return the estimate of `row.rate`."""
    config, _ = plan_of_model(str(MODELS / row.model), parse_gpus(f"{row.tp}x{row.gpu}"), ["batch.seq_len=128"])
    training = plan_input(config).job
    dtype = "float8" if row.narrow else ""
    job = InferenceJob(training.model, training.cluster, "bfloat16", dtype, dtype, graphs=True, margin=0.05)
    layout = Layout(tp=row.tp, expert_tp=row.tp if divisibility(job.model).experts else 1)
    if row.source == "gpt-fast":
        batch, context = np.asarray(row.batch), np.asarray(row.prompt + row.reply / 2)
        return float(1 / decode_step(job, layout, batch, context).seconds)
    batch = row.batch or min(2048, largest_batch(job, layout, row.prompt + row.reply))
    # A steady stream of requests, or one batch.
    count = batch if row.batch else 4 * batch
    time = rollout_time(job, layout, batch, [row.prompt] * count, [row.reply] * count)
    return time.tokens_per_second / row.tp


def compare() -> list[dict[str, object]]:
    """Return each row with its estimate and their ratio."""
    rows = []
    for row in ROWS:
        predicted = predicted_rate(row)
        rows.append({**vars(row), "predicted": round(predicted, 2), "ratio": round(predicted / row.rate, 3)})
    return rows


def typical_error(ratios: list[float]) -> float:
    """Return the geometric mean of the larger of ratio and 1 / ratio, less 1."""
    return exp(mean(abs(log(ratio)) for ratio in ratios)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = compare()
    print(
        f"{'source':19} {'model':13} {'gpu':14} {'tp':>2} {'batch':>5} {'prompt':>6} {'reply':>5} {'tok/s':>8} estimate"
    )
    for row in rows:
        note = "  *" if row["ungrouped"] else ""
        print(
            f"{row['source']:19} {row['model']:13} {row['gpu']:14} {row['tp']:2} {row['batch']:5} {row['prompt']:6} "
            f"{row['reply']:5} {row['rate']:8,.1f} {row['predicted']:8,.1f} {row['ratio']:5.2f}{note}"
        )
    errors = {}
    for name in dict.fromkeys(row.source for row in ROWS):
        own = [row for row in rows if row["source"] == name]
        errors[name] = {
            "all": typical_error([row["ratio"] for row in own]),
            "grouped": typical_error([row["ratio"] for row in own if not row["ungrouped"]]),
        }
        print(f"{name}: error {errors[name]['all']:.1%}, without the rows marked * {errors[name]['grouped']:.1%}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "errors": errors}, indent=1) + "\n")


if __name__ == "__main__":
    main()
