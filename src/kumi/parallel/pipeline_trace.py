"""The measured times of a rank's pipeline actions.

    trace = start_trace(mesh)                                        # on all ranks at once
    train_microbatches(model, mesh, microbatches, trace)
    timeline = gather_timeline(trace, mesh)                          # on rank 0, of all ranks of its pipeline

On CUDA, actions are timed by events on the device, so the host does not wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from kumi.accelerator import is_gpu
from kumi.parallel.mesh import Mesh, barrier
from kumi.plan.pipeline.timeline import TimedAction, Timeline
from kumi.spec.schedules.schedule_record import Action

# Seconds of the host's clock, or an event on the device.
Timestamp = float | torch.cuda.Event


@dataclass(frozen=True)
class PipelineTrace:
    """The actions of a step with their start and end, in order. `start`: when the step began."""

    device: torch.device
    start: Timestamp
    spans: list[tuple[Action, Timestamp, Timestamp]] = field(default_factory=list)


def start_trace(mesh: Mesh) -> PipelineTrace:
    """Return an empty trace that begins now on all ranks. Every rank must call it."""
    if is_gpu(mesh.device):
        torch.cuda.synchronize(mesh.device)  # the trace begins after all work that is queued on the device
    barrier(mesh)
    return PipelineTrace(mesh.device, timestamp(mesh.device))


def timestamp(device: torch.device) -> Timestamp:
    """Return the current time on `device`."""
    if not is_gpu(device):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def record_action(trace: PipelineTrace | None, action: Action, start: Timestamp | None) -> None:
    """Record that `action`, which began at `start`, has ended now; do nothing without a trace."""
    if trace is not None and start is not None:
        trace.spans.append((action, start, timestamp(trace.device)))


def action_start(trace: PipelineTrace | None) -> Timestamp | None:
    """Return the current time for `record_action`, or None without a trace."""
    return None if trace is None else timestamp(trace.device)


def trace_spans(trace: PipelineTrace) -> tuple[TimedAction, ...]:
    """Return the actions with their seconds since the start of the trace. Wait for the device."""
    if is_gpu(trace.device):
        torch.cuda.synchronize(trace.device)
    return tuple(
        TimedAction(action, _seconds(trace.start, begin), _seconds(trace.start, end))
        for action, begin, end in trace.spans
    )


def _seconds(first: Timestamp, second: Timestamp) -> float:
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(second, torch.cuda.Event)
    return float(first.elapsed_time(second)) / 1e3


def gather_timeline(trace: PipelineTrace, mesh: Mesh) -> Timeline | None:
    """Return on rank 0 the timeline of all ranks of its pipeline, None on other ranks. Every rank must call it."""
    local, group = trace_spans(trace), mesh.group("pp")
    all_spans: list[tuple[TimedAction, ...]] = [local]
    if group is not None:
        all_spans = [() for _ in range(mesh.layout.pp)]
        dist.all_gather_object(all_spans, local, group=group)
    if mesh.rank != 0:
        return None
    return Timeline(max(spans[-1].end for spans in all_spans), tuple(all_spans))
