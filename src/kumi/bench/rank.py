"""What each rank does: every measurement in turn, at the same time as all other ranks, as in training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from kumi.bench.clock import seconds_of
from kumi.bench.collectives import Message, groups, messages, seconds_of_message
from kumi.bench.found import Found, Timing, Transfer
from kumi.bench.kernels import kernels
from kumi.errors import OK
from kumi.launch.signals import StopFlag, exit_code, install
from kumi.nn.numerics import use
from kumi.parallel.mesh import Mesh, build_mesh, close_distributed, greatest, init_distributed, total
from kumi.progress import showing
from kumi.spec.layout import Layout
from kumi.spec.numerics import Numerics
from kumi.train.memory import memory_now

# Seconds given to each measurement; what comes on top (memory, first calls, long samples) is about as much.
BUDGET, QUICK_BUDGET = 0.3, 0.1


@dataclass(frozen=True)
class Wanted:
    """What to measure: on "cpu" or "cuda", in `dtypes`, of which training takes `main`, all shapes and sizes or few.

    `numerics` says how a CPU computes.
    """

    device_type: str
    dtypes: tuple[str, ...]
    main: str
    quick: bool
    numerics: Numerics


class Stopped(Exception):
    """A rank was sent the signal `signum`; all ranks raise this at the same measurement."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def measure_rank(wanted: Wanted, out: Path) -> int:
    """Measure, and as rank 0 write what was found to `out`; the exit code (see kumi.errors)."""
    flag = install()
    place = init_distributed(wanted.device_type)
    try:
        mesh = build_mesh(Layout(dp_replicate=place.world_size), place)
        found = _measure(wanted, mesh, flag)
    except Stopped as stopped:
        close_distributed()
        return exit_code(stopped.signum)
    close_distributed()
    if place.rank == 0:
        out.write_text(json.dumps(asdict(found)))
    return OK


def _measure(wanted: Wanted, mesh: Mesh, flag: StopFlag) -> Found:
    torch.manual_seed(mesh.rank)
    interpreter = memory_now(mesh.device)
    if wanted.device_type == "cpu":
        use(wanted.numerics)
    work = list(kernels(mesh.device, wanted.dtypes, wanted.main, quick=wanted.quick))
    sent = list(messages(mesh.place.world_size, wanted.device_type, quick=wanted.quick))
    budget, mine = QUICK_BUDGET if wanted.quick else BUDGET, groups(mesh.place.world_size, mesh.rank)
    timings, transfers = [], []
    with showing("measuring", len(work) + len(sent), str, enabled=mesh.rank == 0) as update:
        for number, kernel in enumerate(work, 1):
            update(number, f"{kernel.kind} {kernel.what} {kernel.dtype}")
            call = kernel.prepare()
            _agree(mesh, flag)
            seconds = seconds_of(call, mesh.device, budget)
            mean = total(torch.tensor(seconds / mesh.place.world_size, dtype=torch.float64), mesh)
            timings.append(Timing(kernel.kind, kernel.dtype, kernel.what, kernel.amount, float(mean)))
        for number, message in enumerate(sent, len(work) + 1):
            update(number, f"{message.kind} {message.size} bytes over {message.degree}")
            _agree(mesh, flag)
            transfers.append(_transfer(message, mine[message.degree], mesh, budget))
    return Found(
        kernels=tuple(timings),
        transfers=tuple(transfers),
        reserved=_context(mesh.device) if wanted.device_type == "cuda" else interpreter,
        processors=_processors(mesh.device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        numerics=str(wanted.numerics) if wanted.device_type == "cpu" else "",
    )


def _transfer(message: Message, group: torch.distributed.ProcessGroup, mesh: Mesh, budget: float) -> Transfer:
    seconds = seconds_of_message(message, group, mesh, budget)
    return Transfer(message.kind, message.degree, message.size, seconds)


def _agree(mesh: Mesh, flag: StopFlag) -> None:
    """Brings the ranks together; raises Stopped on all of them when one was sent a signal."""
    signum = int(greatest(torch.tensor(flag.requested or 0), mesh))
    if signum:
        raise Stopped(signum)


def _context(device: torch.device) -> int:
    """Bytes of a GPU that are taken outside the allocator: by the context and, once they are used, the libraries."""
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free - torch.cuda.memory_reserved(device)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
