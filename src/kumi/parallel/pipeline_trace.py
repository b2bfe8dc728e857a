"""What a rank of a pipeline did when, as measured.

    record = start(mesh)                # all ranks at once
    train(model, mesh, microbatches, record)
    timeline = gather(record, mesh)     # on pipeline rank 0: of all ranks of its pipeline

On CUDA actions are measured where they run, by events, so that the host does not wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from kumi.parallel.mesh import Mesh, barrier
from kumi.plan.pipeline.timeline import TimedAction, Timeline
from kumi.spec.schedules.schedule_record import Action

# A moment: seconds of the host's clock, or an event of the device's.
Mark = float | torch.cuda.Event


@dataclass(frozen=True)
class Record:
    """The actions of a step with their begin and end, in the order they were done; `begun` is when the step began."""

    device: torch.device
    begun: Mark
    spans: list[tuple[Action, Mark, Mark]] = field(default_factory=list)


def start(mesh: Mesh) -> Record:
    """An empty record that begins now, on all ranks. Every rank must call it."""
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)  # else it would begin when what was asked of the device before is done
    barrier(mesh)
    return Record(mesh.device, now(mesh.device))


def now(device: torch.device) -> Mark:
    """This moment on `device`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def note(record: Record | None, action: Action, begun: Mark | None) -> None:
    """Takes down that `action`, which was `begun` then, has ended now."""
    if record is not None and begun is not None:
        record.spans.append((action, begun, now(record.device)))


def mark(record: Record | None) -> Mark | None:
    """This moment, where something is recorded."""
    return None if record is None else now(record.device)


def spans(record: Record) -> tuple[TimedAction, ...]:
    """What was done, in seconds from the record's beginning. Waits for the device."""
    if record.device.type == "cuda":
        torch.cuda.synchronize(record.device)
    return tuple(
        TimedAction(action, _seconds(record.begun, begin), _seconds(record.begun, end))
        for action, begin, end in record.spans
    )


def _seconds(first: Mark, second: Mark) -> float:
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(second, torch.cuda.Event)
    return float(first.elapsed_time(second)) / 1e3


def gather(record: Record, mesh: Mesh) -> Timeline | None:
    """What every rank of the pipeline of rank 0 did, on rank 0; None on all others. Every rank must call it."""
    mine, group = spans(record), mesh.group("pp")
    found: list[tuple[TimedAction, ...]] = [mine]
    if group is not None:
        found = [() for _ in range(mesh.layout.pp)]
        dist.all_gather_object(found, mine, group=group)
    if mesh.rank != 0:
        return None
    return Timeline(max(rank[-1].end for rank in found), tuple(found))
