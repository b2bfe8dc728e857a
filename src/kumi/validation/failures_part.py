"""Parts of the validation: a save under way, memory that does not suffice, and a run that is stopped and resumed."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from kumi.accelerator import is_gpu
from kumi.bench.clock import synchronize
from kumi.errors import DeviceMemoryError
from kumi.files.output import write_text
from kumi.storage.checkpoint import AsyncSaver
from kumi.train.process_memory import convert_memory_errors
from kumi.train.train_state import checkpoint_pieces
from kumi.validation.fitting_case import SHARE, StepCase, fitted, free_bytes, tiny
from kumi.validation.model_shapes import LLAMA_1B
from kumi.validation.part import Rows, Setting, Skipped
from kumi.validation.timed_step import PreparedStep, prepared, validated_device

# Steps that are timed before a save; while it is written, at most three times as many.
_STEPS = 5


def rows_of_saving(setting: Setting) -> Rows:
    """Yield the times of steps before checkpoints are written to a temporary folder, and while they are."""
    device = validated_device(setting)
    step = _step(StepCase(LLAMA_1B, layers=4, seq_len=4096), device, setting)
    step(), step()
    plain = [_seconds(step, device) for _ in range(_STEPS)]
    with TemporaryDirectory() as folder:
        saver, began = AsyncSaver(), time.perf_counter()
        saver.reserve(checkpoint_pieces(step.rank_state))
        meanwhile = [_seconds(step, device)]
        while saver.reserving:
            meanwhile.append(_seconds(step, device))
        yield {
            "save": "host memory for them",
            "write, s": time.perf_counter() - began,
            "step before, ms": 1e3 * median(plain),
            "step meanwhile, ms": 1e3 * median(meanwhile),
        }
        for number in (1, 2):
            pieces = checkpoint_pieces(step.rank_state)
            began = time.perf_counter()
            saver.save(Path(folder) / f"step_{number:06d}", pieces, {"step": number}, keep=1)
            stall = time.perf_counter() - began
            meanwhile = []
            while saver.busy and len(meanwhile) < 3 * _STEPS:
                meanwhile.append(_seconds(step, device))
            saver.wait()
            yield {
                "save": number,
                "GB": sum(piece.data.nbytes for piece in pieces) / 1e9,
                "stall, ms": 1e3 * stall,
                "write, s": time.perf_counter() - began,
                "step before, ms": 1e3 * median(plain),
                "step meanwhile, ms": 1e3 * median(meanwhile) if meanwhile else None,
            }


def rows_of_memory(setting: Setting) -> Rows:
    """Yield the message of a step for which the memory does not suffice, its exit code, and the step after it."""
    device = validated_device(setting)
    step = _step(StepCase(LLAMA_1B, layers=4, seq_len=4096), device, setting)
    before = float(step())
    try:
        with _little_memory(device), convert_memory_errors(step.rank_state.run):
            step()
            torch.empty(2**34, dtype=torch.uint8, device=device)  # a tiny step may find room
    except DeviceMemoryError as error:
        yield {"what": "message", "value": str(error)}
        yield {"what": "exit code", "value": error.exit_code}
    else:
        yield {"what": "message", "value": "none: the step found memory"}
    step.rank_state.model.zero_grad(set_to_none=True)
    after = float(step())
    yield {"what": "the next step", "value": f"loss {after:.4f}, before {before:.4f}"}


@contextmanager
def _little_memory(device: torch.device) -> Iterator[None]:
    """A context in which `device` has hardly more memory than is in use."""
    if is_gpu(device):
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved(device) + 2**26) / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_RUN = """
name = "validation"
[model]
init = "random"
[model.config]
model_type = "llama"
architectures = ["LlamaForCausalLM"]
vocab_size = 512
hidden_size = 256
intermediate_size = 512
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 256
rms_norm_eps = 1e-5
rope_theta = 10000.0
tie_word_embeddings = true
[cluster]
devices_per_node = 1
[batch]
seq_len = 64
tokens_per_step = 512
[data]
tokenizer = { vocab_size = 512 }
sources = [{ path = "text.txt" }]
validation = 0
[optim]
schedule = "constant"
warmup_steps = 0
[train]
steps = 400
out = "run"
[checkpoint]
every = 100
"""
_WORDS = ("a", "few", "words", "that", "repeat", "in", "every", "order", "make", "text", "which", "is", "easy")


def rows_of_run(setting: Setting) -> Rows:
    """Yield how `kumi train` ends when it is stopped, and when the same command resumes it."""
    validated_device(setting)
    draw = random.Random(0)
    with TemporaryDirectory() as name:
        folder = Path(name)
        lines = (" ".join(draw.choices(_WORDS, k=12)) for _ in range(2000))
        write_text(folder / "text.txt", "\n\n".join(lines) + "\n")
        write_text(folder / "run.toml", _RUN)
        command = [sys.executable, "-m", "kumi", "train", "run.toml"]
        metrics, began = folder / "run" / "metrics.jsonl", time.perf_counter()
        first = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while first.poll() is None and len(_losses(metrics)) < 3:
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        stderr = first.communicate()[1]
        stopped = len(_losses(metrics))
        yield {"what": "stopped by SIGTERM", "exit code": first.returncode, "steps": stopped, "s": _since(began)}
        if not stopped:
            raise RuntimeError(f"the run did not begin: {(stderr.strip().splitlines() or ['no message'])[-1]}")
        began = time.perf_counter()
        options = [f"train.steps={stopped + 5}", "--allow-change", "train.steps"]
        second = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
        losses = _losses(metrics)
        yield {"what": "resumed", "exit code": second.returncode, "steps": len(losses), "s": _since(began)}
        if losses:
            yield {"what": f"losses: {losses[0]:.4f} at first, {losses[-1]:.4f} at last"}
        if second.returncode:
            yield {"what": f"error: {second.stderr.strip()[-200:]}"}


def _losses(metrics: Path) -> list[float]:
    """Return the losses of the steps in a run's metrics; of a step that occurs twice, the last."""
    if not os.path.exists(metrics):
        return []
    losses = {}
    for line in metrics.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # being written
            continue
        if "train/loss" in entry:
            losses[entry["step"]] = float(entry["train/loss"])
    return list(losses.values())


def _since(began: float) -> float:
    return time.perf_counter() - began


def _seconds(step: PreparedStep, device: torch.device) -> float:
    began = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - began


def _step(case: StepCase, device: torch.device, setting: Setting) -> PreparedStep:
    """Return a step of `case` with sizes that fit. Raise Skipped if none do."""
    sized = tiny(case) if setting.tiny else fitted(case, SHARE * free_bytes(device))
    if sized is None:
        raise Skipped("no size fits the free memory of the device")
    return prepared(sized, device)
