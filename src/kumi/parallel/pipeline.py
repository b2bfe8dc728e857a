"""Microbatches through this rank's stages, in the order of the layout's schedule: forwards, backwards and messages.

    loss = train(model, mesh, microbatches)         # forward and backward of all; gradients are then complete
    outputs = forward(model, mesh, microbatches)    # what the head returns of each; empty where it is elsewhere

A rank carries out the list of `kumi.spec.sends_and_recvs.pipeline_steps`, the one that a planner simulates. With one
rank and one stage that is a forward and a backward of each microbatch in turn. Sends and receives are posted where the
list has them, so that all ranks keep to one order, and are waited for where their tensors are needed.

Of a forward only the graph is kept: what it returned is freed once it has been sent. A gradient of weights that the
schedule puts off (W) is kept as the linear layers' inputs and the gradients of their outputs until its turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kumi.nn.attention.attention_context import positions
from kumi.nn.dtypes import wide
from kumi.nn.linear import Later, linears
from kumi.parallel import data_parallel, grad_sync
from kumi.parallel.mesh import Mesh
from kumi.parallel.pipeline_trace import Record, mark, note
from kumi.parallel.stage_modules import stages_of
from kumi.spec.schedules.schedule_record import Action
from kumi.spec.sends_and_recvs import (
    ACTIVATION,
    GRADIENT,
    Message,
    PipelineStep,
    Receive,
    Send,
    forward_pipeline_steps,
    pipeline_steps,
)

# The arguments of the decoder for one microbatch, by their names: tensors, and the loss where it is a function.
Inputs = Mapping[str, Any]
# Of which kind, of which stage (that makes it), of which microbatch.
Key = tuple[str, int, int]
# Which group messages of each kind go through.
GROUPS = {ACTIVATION: "pp", GRADIENT: "pp_back"}


@dataclass(frozen=True)
class _Run:
    """A pass of all microbatches, and what is alive of it.

    `incoming` and `outgoing` hold tensors that were received, or made on this rank, and those to be sent, by what they
    are; `posted` the receives that are under way and their room; `sent` the sends whose tensors must stay; `graphs` the
    input of every forward that waits for its backward, if it came from a stage before, and its output's place in the
    graph; `later` weight gradients to do; `losses` and `outputs` what the head returned.
    """

    mesh: Mesh
    stages: Mapping[int, nn.Module]
    last: int
    microbatches: Sequence[Inputs]
    final: Mapping[int, Action]
    learn: bool
    record: Record | None
    incoming: dict[Key, Tensor] = field(default_factory=dict)
    outgoing: dict[Key, Tensor] = field(default_factory=dict)
    posted: dict[Key, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    graphs: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = field(default_factory=dict)
    later: dict[tuple[int, int], Later] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


def train(model: nn.Module, mesh: Mesh, microbatches: Sequence[Inputs], record: Record | None = None) -> Tensor:
    """Forward and backward of `microbatches`, whose `token_weights` or `loss` say how the loss is made; what ranks
    share of the gradients is summed.

    Returns the loss of this rank's tokens, a scalar: 0 on ranks without the head. `record` takes down what was done
    when.
    """
    layout = mesh.layout
    steps = pipeline_steps(layout.schedule, layout.pp, layout.stages, len(microbatches))[mesh.index("pp")]
    run = _start(model, mesh, microbatches, steps, learn=True, record=record)
    _carry_out(run, steps)
    left = [*run.graphs, *run.later, *run.incoming, *run.outgoing, *run.posted]
    assert not left, f"something is left of the step: {left}"
    grad_sync.complete(model, mesh)
    dtype = wide(next(model.parameters()).dtype)
    return torch.stack(run.losses).sum() if run.losses else torch.zeros((), dtype=dtype, device=mesh.device)


@torch.no_grad()
def forward(model: nn.Module, mesh: Mesh, microbatches: Sequence[Inputs]) -> list[Tensor]:
    """What the head returns for each of `microbatches` (see `Decoder.forward`); nothing on ranks without the head."""
    layout = mesh.layout
    steps = forward_pipeline_steps(layout.schedule, layout.pp, layout.stages, len(microbatches))[mesh.index("pp")]
    run = _start(model, mesh, microbatches, steps, learn=False, record=None)
    _carry_out(run, steps)
    return run.outputs


def _start(
    model: nn.Module,
    mesh: Mesh,
    microbatches: Sequence[Inputs],
    steps: Sequence[PipelineStep],
    *,
    learn: bool,
    record: Record | None,
) -> _Run:
    final = {step.stage: step for step in steps if isinstance(step, Action)}
    last, stages = mesh.layout.pp * mesh.layout.stages - 1, stages_of(model)
    return _Run(mesh, stages, last, microbatches, final, learn, record)


def _carry_out(run: _Run, steps: Sequence[PipelineStep]) -> None:
    for step in steps:
        if isinstance(step, Send):
            _send(run, step.message)
        elif isinstance(step, Receive):
            _receive(run, step.message)
        elif step.kind == "F":
            _forward(run, step)
        elif step.kind == "W":
            _weights(run, step)
        else:
            _backward(run, step)
        _forget(run.sent, wait=False)
    _forget(run.sent, wait=True)


def _forward(run: _Run, action: Action) -> None:
    _, number, microbatch = action
    stage, inputs = run.stages[number], dict(run.microbatches[microbatch])
    taken = _take(run, (ACTIVATION, number - 1, microbatch)) if number else None
    if taken is not None:
        taken.requires_grad_(run.learn)
    begun = mark(run.record)
    tokens = inputs.pop("input_ids")
    if number and inputs.get("position_ids") is None:
        inputs["position_ids"] = positions(tokens, inputs.get("document_ids"))
    final = microbatch == len(run.microbatches) - 1
    with data_parallel.sync_context(stage, run.mesh, last=final):
        out = stage(tokens if taken is None else taken, **inputs)
    if isinstance(out, tuple):
        out = out[0]
    if run.learn:
        run.graphs[number, microbatch] = taken, get_gradient_edge(out)
    if number == run.last:
        (run.losses if run.learn else run.outputs).append(out.detach())
    else:
        _give(run, (ACTIVATION, number, microbatch), number + 1, out.detach())
    note(run.record, action, begun)


def _backward(run: _Run, action: Action) -> None:
    kind, number, microbatch = action
    grad = None if number == run.last else _take(run, (GRADIENT, number + 1, microbatch))
    begun = mark(run.record)
    taken, edge = run.graphs.pop((number, microbatch))
    if kind == "B":
        with data_parallel.sync_context(run.stages[number], run.mesh, last=run.final[number] == action):
            _differentiate(edge, grad)
    else:
        run.later[number, microbatch] = _put_off(run, number, edge, grad)
    if taken is not None:
        assert taken.grad is not None
        _give(run, (GRADIENT, number, microbatch), number - 1, taken.grad)
    note(run.record, action, begun)


def _put_off(run: _Run, number: int, edge: GradientEdge, grad: Tensor | None) -> Later:
    """The gradients of inputs, now; what is left to do for those of weights."""
    later: Later = []
    stage = run.stages[number]
    layers = linears(stage)
    for layer in layers:
        layer.later = later
    with data_parallel.inputs_context(stage, run.mesh):
        _differentiate(edge, grad)
    for layer in layers:
        layer.later = None
    return later


def _weights(run: _Run, action: Action) -> None:
    _, number, microbatch = action
    begun = mark(run.record)
    later = run.later.pop((number, microbatch))
    while later:
        later.pop()()
    data_parallel.reduce_left(run.stages[number], run.mesh, last=run.final[number] == action)
    note(run.record, action, begun)


def _differentiate(edge: GradientEdge, grad: Tensor | None) -> None:
    torch.autograd.backward((edge,), (grad,))


def _take(run: _Run, key: Key) -> Tensor:
    """What a neighbouring stage made: it lies here already, or is waited for."""
    if key in run.posted:
        request, tensor = run.posted.pop(key)
        request.wait()
        return tensor
    return run.incoming.pop(key)


def _give(run: _Run, key: Key, target: int, tensor: Tensor) -> None:
    """Keeps `tensor` for stage `target`, on this rank or until it is sent."""
    (run.incoming if target in run.stages else run.outgoing)[key] = tensor


def _send(run: _Run, message: Message) -> None:
    tensor = run.outgoing.pop(message[:3]).contiguous()  # what is not would be sent with the wrong strides
    request = dist.isend(tensor, group=run.mesh.group(GROUPS[message.kind]), group_dst=message.target)
    assert request is not None
    run.sent.append((request, tensor))


def _receive(run: _Run, message: Message) -> None:
    decoder: Any = next(iter(run.stages.values()))
    shape = hidden_shape(run.microbatches[message.microbatch], decoder.spec.hidden_size, run.mesh)
    room = torch.empty(shape, dtype=decoder.compute_dtype, device=run.mesh.device)
    request = dist.irecv(room, group=run.mesh.group(GROUPS[message.kind]), group_src=message.source)
    assert request is not None
    run.posted[message[:3]] = request, room


def hidden_shape(inputs: Inputs, hidden_size: int, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the hidden states between two stages: (B, S, D), or the rank's part of all tokens, (T, D), where
    sequence parallelism divides them."""
    rows, length = inputs["input_ids"].shape
    if mesh.layout.tp > 1 and mesh.layout.sequence_parallel:
        return (rows * length // mesh.layout.tp, hidden_size)
    return (rows, length, hidden_size)


def _forget(sent: list[tuple[dist.Work, Tensor]], *, wait: bool) -> None:
    """Frees what has been sent; all of it where it should `wait`."""
    left = []
    for request, kept in sent:
        if wait or request.is_completed():
            request.wait()
        else:
            left.append((request, kept))
    sent[:] = left
