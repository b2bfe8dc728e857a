"""Part of the validation: layouts over all devices of the machine, and a rank that is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kumi.errors import KumiError
from kumi.files.output import replace_text
from kumi.launch.local import run_ranks
from kumi.parallel import RankInfo, build_mesh, init_distributed
from kumi.parallel.mesh import Mesh, all_reduce_max, all_reduce_sum, close_distributed
from kumi.spec.comm import Comm
from kumi.spec.layout import Layout
from kumi.validation.fitting_case import SHARE, StepCase, estimated_bytes, free_bytes, tiny
from kumi.validation.model_shapes import LLAMA_8B
from kumi.validation.numbers_part import differences, near
from kumi.validation.part import Row, Rows, Setting, Skipped, Value
from kumi.validation.timed_step import fresh, prepared, timed
from kumi.validation.tiny_steps import ROWS, TinyCase, tiny_steps

# More devices than this teach nothing that fewer do not.
_MOST = 8
_MICROBATCHES = 4


def rows_of_several(setting: Setting) -> Rows:
    """Yield each layout's losses beside those of one device, its speed, and how ranks end when one is killed."""
    count = _device_count(setting)
    if count < 2:
        raise Skipped(f"layouts need at least 2 devices, and there is {count}")
    for name, case in _cases(count, setting.device).items():
        yield from _in_ranks(name, case, setting, count, timed_too=not setting.tiny or name == "ddp")
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        try:
            code = run_ranks(_killed_rank, (setting.device,), nproc=count, log_dir=Path(folder), grace=10.0)
            end = f"exit code {code}"
        except KumiError as error:
            end = str(error)
        yield {"layout": "a rank is killed", "s": time.perf_counter() - began, "result": end}


def _device_count(setting: Setting) -> int:
    """Return the largest of 2, 4 and `_MOST` that is at most the number of the machine's GPUs; that number below 2.

    On a CPU, return 2: two processes.
    """
    if setting.tiny:
        return 2
    count = torch.cuda.device_count()
    return max((size for size in (2, 4, _MOST) if size <= count), default=count)


def _cases(count: int, device: str) -> dict[str, TinyCase]:
    """Return a case of each axis over `count` devices. tp is 2, because the tiny models have two key-value heads."""
    cases = {
        "ddp": TinyCase(Layout(dp_replicate=count)),
        "zero3": TinyCase(Layout(dp_shard=count, zero=3)),
        "tp": TinyCase(Layout(tp=2, dp_shard=count // 2)),
        "tp overlapped": TinyCase(Layout(tp=2, dp_shard=count // 2), comm=Comm(async_tp=True)),
        "pp": TinyCase(Layout(pp=2, dp_replicate=count // 2), microbatches=_MICROBATCHES),
        "cp": TinyCase(Layout(cp=count, zero=1)),
        "ep": TinyCase(Layout(dp_shard=count, ep=count, zero=1), "experts"),
    }
    # A rank has ROWS / dp rows of a batch, and at most as many microbatches.
    limited = {
        name: replace(case, microbatches=min(case.microbatches, ROWS // case.layout.dp)) for name, case in cases.items()
    }
    return {name: case for name, case in limited.items() if device == "cuda" or not case.comm.async_tp}


def _in_ranks(name: str, case: TinyCase, setting: Setting, count: int, *, timed_too: bool) -> Iterator[Row]:
    """Yield the row of a layout. It has ranks of its own, so that a layout that fails costs no other.

    `timed_too`: time steps of a larger model, too. On a busy CPU every message waits for the other rank's turn.
    """
    with TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        try:
            arguments = (case, setting, out, timed_too)
            code = run_ranks(_measure_rank, arguments, nproc=count, log_dir=Path(folder) / "logs", grace=10.0)
        except KumiError as error:
            yield {"layout": name, "result": str(error)}
            return
        row: Mapping[str, float] = json.loads(out.read_bytes()) if code == 0 else {}
        yield {"layout": name, "result": "ok" if code == 0 else f"exit code {code}", **row}


def _measure_rank(case: TinyCase, setting: Setting, out: Path, timed_too: bool) -> None:
    """Compare the layout's steps with those of one device, and time steps of a larger model. Rank 0 writes `out`."""
    torch.set_float32_matmul_precision("highest")
    place = init_distributed(setting.device, timeout_s=60.0)
    mesh = build_mesh(case.layout, place)
    steps = tiny_steps(case, mesh)
    alone = replace(case, layout=Layout(), comm=Comm())
    own = RankInfo(0, 1, 0, place.device)
    expected = tiny_steps(alone, build_mesh(alone.layout, own))
    loss, norm = differences(steps, expected)
    row: dict[str, Value] = {
        "difference of losses": loss,
        "difference of norms": norm,
        "near": near(steps, expected, case.precision),
    }
    if timed_too and case.model == "dense":
        row |= _speed(case, setting, mesh)
    if place.rank == 0:
        replace_text(out, json.dumps(row))
    close_distributed()


def _speed(case: TinyCase, setting: Setting, mesh: Mesh) -> Row:
    """Return the tokens per second of steps with layers of Llama-3.1-8B in the layout of `case`."""
    layers = 2 * case.layout.pp * case.layout.stages
    step_case = StepCase(LLAMA_8B | {"vocab_size": 32768}, layers, 4096, layout=case.layout, recompute="full")
    step_case = replace(step_case, microbatches=case.microbatches, async_tp=case.comm.async_tp)
    if setting.tiny:
        step_case = tiny(step_case)
    fits = estimated_bytes(step_case) <= SHARE * free_bytes(mesh.device)
    # All ranks leave these steps out, or none does.
    if int(all_reduce_sum(torch.tensor(float(not fits)), mesh)):
        return {"sizes": "too large for the free memory"}
    with fresh(mesh.device):
        step = prepared(step_case, mesh.device)
        times = timed(step, mesh.device, setting.seconds, lambda size: int(all_reduce_max(torch.tensor(size), mesh)))
    return {"sizes": step_case.sizes, "tokens/s": step_case.tokens / times["step_s"], "step, ms": 1e3 * times["step_s"]}


def _killed_rank(device: str) -> None:
    """Kill rank 1 while the others wait for it in a collective."""
    place = init_distributed(device, timeout_s=60.0)
    mesh = build_mesh(Layout(dp_replicate=place.world_size), place)
    all_reduce_sum(torch.ones(1, device=place.device), mesh)
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce_sum(torch.ones(1, device=place.device), mesh)
    time.sleep(30.0)
