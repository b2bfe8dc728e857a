"""Layouts over several GPUs train as one GPU does: loss and gradient norm of three AdamW steps.

With KUMI_TEST_DEVICE=cpu the ranks are processes over gloo instead.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import gpu_worker
import pytest
import torch

from kumi.parallel import RankInfo, build_mesh
from kumi.spec.comm import Comm
from kumi.spec.layout import Layout
from kumi.validation import tiny_steps
from kumi.validation.numbers_part import near
from kumi.validation.tiny_steps import TinyCase as Case

SECONDS = 540.0

ALONE = {
    "stages of one rank": Case(Layout(schedule="gpipe")),
    "weight gradients put off": Case(Layout(schedule="zb-h1")),
    "recomputed": Case(Layout(recompute="selective"), precision="bf16"),
    "experts": Case(Layout(), "experts"),
    "experts in bf16": Case(Layout(), "experts", "bf16"),
    "latent attention": Case(Layout(), "latent", "bf16"),
    "latent attention, whole rows": Case(Layout(), "latent", "bf16", documents=False),
    "sinks": Case(Layout(), "sinks", "bf16"),
    "scores": Case(Layout(recompute="selective"), "scores"),
    "scores in bf16": Case(Layout(), "scores", "bf16"),
    "scores, whole rows": Case(Layout(), "scores", "bf16", documents=False),
}
_OVERLAPPED = Comm(async_tp=True)
ON_2 = {
    "ddp": Case(Layout(dp_replicate=2)),
    **{f"zero{zero}": Case(Layout(dp_shard=2, zero=zero)) for zero in (1, 2, 3)},
    "tp": Case(Layout(tp=2)),
    "tp without sp": Case(Layout(tp=2, sequence_parallel=False)),
    "tp in bf16": Case(Layout(tp=2), precision="bf16"),
    "tp, experts": Case(Layout(tp=2), "experts"),
    "tp, latent attention": Case(Layout(tp=2), "latent"),
    "tp overlapped": Case(Layout(tp=2), comm=_OVERLAPPED),
    "tp overlapped, recomputed, in bf16": Case(Layout(tp=2, recompute="selective"), precision="bf16", comm=_OVERLAPPED),
    "pp": Case(Layout(pp=2), microbatches=4),
    "pp in bf16": Case(Layout(pp=2), precision="bf16", microbatches=4),
    "pp interleaved": Case(Layout(pp=2, schedule="interleaved", stages=2), microbatches=4),
    "pp zb-v": Case(Layout(pp=2, schedule="zb-v", stages=2), microbatches=4),
    "cp ring": Case(Layout(cp=2, zero=1)),
    "cp ring in bf16": Case(Layout(cp=2, zero=3), precision="bf16"),
    "cp ring in bf16, whole rows": Case(Layout(cp=2, zero=3), precision="bf16", documents=False),
    "cp ring, scores": Case(Layout(cp=2, zero=1), "scores"),
    "cp ring, sinks": Case(Layout(cp=2, zero=1), "sinks", "bf16"),
    "cp ulysses": Case(Layout(cp=2, zero=1, context="ulysses"), precision="bf16"),
    "ep": Case(Layout(dp_shard=2, ep=2, zero=2), "experts"),
    "expert tp": Case(Layout(dp_shard=2, expert_tp=2, zero=1), "experts"),
}
ON_4 = {
    "pp, tp": Case(Layout(pp=2, tp=2), microbatches=4),
    "tp, zero3": Case(Layout(tp=2, dp_shard=2, zero=3)),
    "cp, zero3": Case(Layout(cp=2, dp_shard=2, zero=3), precision="bf16"),
    "pp, ep, zero1": Case(Layout(pp=2, dp_shard=2, ep=2, zero=1), "experts"),
    "tp, cp": Case(Layout(tp=2, cp=2, zero=1)),
}


@pytest.fixture(autouse=True)
def _exact():
    """Compute float32 matmuls in float32, without TF32."""
    torch.set_float32_matmul_precision("highest")


def on(kind: str, cases: dict[str, Case]) -> dict[str, Case]:
    """Return the cases that the `kind` of device can run."""
    return {name: case for name, case in cases.items() if kind == "cuda" or not case.comm.async_tp}


@cache
def alone(model: str, precision: str, documents: bool, device: torch.device) -> list[tuple[float, float]]:
    """Return the results of one device."""
    case = Case(Layout(), model, precision, documents=documents)
    return tiny_steps.tiny_steps(case, build_mesh(case.layout, RankInfo(0, 1, 0, device)))


def compare(case: Case, steps: list[tuple[float, float]], device: torch.device) -> None:
    expected = alone(case.model, case.precision, case.documents, device)
    assert near(steps, expected, case.precision), (steps, expected)


@cache
def trained(kind: str, count: int) -> tuple[dict[str, list[tuple[float, float]]], str]:
    """Return the results of `count` ranks in every case, and the end of their errors if they failed."""
    with TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        cases, out = Path(folder) / "cases.json", Path(folder) / "out.json"
        every = on(kind, {2: ON_2, 4: ON_4}[count])
        cases.write_text(json.dumps({name: asdict(case) for name, case in every.items()}))
        out.write_text("{}")
        port = free.getsockname()[1]
        free.close()
        errors = _ranks([sys.executable, gpu_worker.__file__, str(cases), str(out), kind], count, port)
        return {name: [tuple(step) for step in steps] for name, steps in json.loads(out.read_text()).items()}, errors


def _ranks(command: list[str], count: int, port: int) -> str:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join(path for path in sys.path if path)
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": paths},
        )
        for rank in range(count)
    ]
    try:
        errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return "\n".join(text[-2000:] for text, rank in zip(errors, ranks) if rank.returncode)


def on_ranks(name: str, count: int, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, and there are {torch.cuda.device_count()}")
    case = {2: ON_2, 4: ON_4}[count][name]
    if case.comm.async_tp and device.type != "cuda":
        pytest.skip("products overlap with messages on GPUs only")
    results, errors = trained(device.type, count)
    assert name in results, f"the ranks failed before, or in, {name!r}:\n{errors}"
    compare(case, results[name], device)


@pytest.mark.parametrize("name", ALONE)
def test_one_device(name, device):
    compare(
        ALONE[name],
        tiny_steps.tiny_steps(ALONE[name], build_mesh(ALONE[name].layout, RankInfo(0, 1, 0, device))),
        device,
    )


@pytest.mark.parametrize("name", tiny_steps.MODELS)
def test_one_device_is_the_cpu(name, device):
    cpu = torch.device("cpu")
    compare(Case(Layout(), name), alone(name, "fp32", True, device), cpu)


@pytest.mark.parametrize("name", ON_2)
def test_two_devices(name, device):
    on_ranks(name, 2, device)


@pytest.mark.parametrize("name", ON_4)
def test_four_devices(name, device):
    on_ranks(name, 4, device)
