"""The program of a measuring rank: every measurement in turn, at the same time as all other ranks, as in training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kumi.accelerator import is_gpu
from kumi.bench.clock import seconds_of
from kumi.bench.measurements import Measurements, Timing, Transfer
from kumi.bench.time_collectives import CollectiveCase, cases, groups, seconds_of_case
from kumi.bench.time_kernels import Kernel, kernels
from kumi.errors import OK
from kumi.launch.signals import StopFlag, exit_code, install
from kumi.nn.numerics import use_numerics
from kumi.parallel.mesh import Mesh, all_reduce_max, all_reduce_sum, build_mesh, close_distributed, init_distributed
from kumi.progress import show_progress
from kumi.spec.layout import Layout
from kumi.spec.numerics import Numerics
from kumi.train.process_memory import baseline_memory

# Seconds per measurement, and per measurement of a quick bench; allocation, first calls and long samples take about as
# much again.
BUDGET, QUICK_BUDGET = 0.3, 0.1
# Attention over long documents is left out on a device on which a call would take longer than this, in seconds.
LONGEST_S = 1.5


@dataclass(frozen=True)
class BenchRequest:
    """The measurements to make.

    `device_type`: cpu or cuda.
    `dtypes`: the dtypes to measure.
    `main`: the dtype among these in which training computes.
    `quick`: measure fewer shapes and sizes.
    `numerics`: how a CPU computes (see `kumi.spec.numerics`).
    """

    device_type: str
    dtypes: tuple[str, ...]
    main: str
    quick: bool
    numerics: Numerics


class Stopped(Exception):
    """Raised by all ranks at the same measurement when one of them received the signal `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def measure_rank(request: BenchRequest, out: Path) -> int:
    """Measure; on rank 0, write the measurements to `out` as JSON. Return the exit code (see kumi.errors)."""
    flag = install()
    place = init_distributed(request.device_type)
    try:
        mesh = build_mesh(Layout(dp_replicate=place.world_size), place)
        measured = _measure(request, mesh, flag)
    except Stopped as stopped:
        close_distributed()
        return exit_code(stopped.signum)
    close_distributed()
    if place.rank == 0:
        out.write_text(json.dumps(asdict(measured)))
    return OK


def _measure(request: BenchRequest, mesh: Mesh, flag: StopFlag) -> Measurements:
    """Time all kernels and collectives together with the other ranks. Raise Stopped if a rank received a signal."""
    torch.manual_seed(mesh.rank)
    interpreter = baseline_memory(mesh.device)
    if request.device_type == "cpu":
        use_numerics(request.numerics)
    compute = list(kernels(mesh.device, request.dtypes, request.main, quick=request.quick))
    collectives = list(cases(mesh.rank_info.world_size, request.device_type, quick=request.quick))
    budget, own_groups = QUICK_BUDGET if request.quick else BUDGET, groups(mesh.rank_info.world_size, mesh.rank)
    timings: list[Timing] = []
    transfers = []
    with show_progress("measuring", len(compute) + len(collectives), str, enabled=mesh.rank == 0) as update:
        for number, kernel in enumerate(compute, 1):
            update(number, f"{kernel.kind} {kernel.what} {kernel.dtype}")
            if _too_long(kernel, timings):
                continue
            work = kernel.prepare()
            _synchronize(mesh, flag)
            seconds = seconds_of(work, mesh.device, budget)
            mean = all_reduce_sum(torch.tensor(seconds / mesh.rank_info.world_size, dtype=torch.float64), mesh)
            figures = (kernel.amount, float(mean), kernel.tokens, kernel.rows)
            timing = Timing(kernel.kind, kernel.dtype, kernel.what, *figures)
            timings.append(timing)
        for number, case in enumerate(collectives, len(compute) + 1):
            update(number, f"{case.kind} {case.size} bytes over {case.degree}")
            _synchronize(mesh, flag)
            transfers.append(_transfer(case, own_groups[case.degree], mesh, budget))
    return Measurements(
        kernels=tuple(timings),
        transfers=tuple(transfers),
        reserved=_outside_allocator(mesh.device) if request.device_type == "cuda" else interpreter,
        processors=_processors(mesh.device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        numerics=str(request.numerics) if request.device_type == "cpu" else "",
    )


def _too_long(kernel: Kernel, timings: list[Timing]) -> bool:
    """Return True if a call of the attention `kernel`, at the best speed in `timings`, would take over `LONGEST_S`.

    All ranks have the same `timings`, so they leave out the same kernels.
    """
    rates = [timing.rate for timing in timings if (timing.kind, timing.dtype) == (kernel.kind, kernel.dtype)]
    return kernel.tokens > 0 and bool(rates) and kernel.amount > max(rates) * LONGEST_S


def _transfer(case: CollectiveCase, group: torch.distributed.ProcessGroup, mesh: Mesh, budget: float) -> Transfer:
    seconds = seconds_of_case(case, group, mesh, budget)
    return Transfer(case.kind, case.degree, case.size, seconds)


def _synchronize(mesh: Mesh, flag: StopFlag) -> None:
    """Synchronize the ranks; raise Stopped on all of them if one received a signal."""
    signum = int(all_reduce_max(torch.tensor(flag.requested or 0), mesh))
    if signum:
        raise Stopped(signum)


def _outside_allocator(device: torch.device) -> int:
    """Return the bytes used on a GPU outside PyTorch's allocator: by the context and the libraries."""
    free, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free - torch.cuda.memory_reserved(device)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu(device) else 0
