"""Run microbatches through this rank's pipeline stages, in the order of the layout's schedule.

    loss = train_microbatches(model, mesh, microbatches)         # forward and backward; gradients are then complete
    outputs = forward_microbatches(model, mesh, microbatches)    # results of the head; empty on ranks without it

A rank executes the list of `kumi.spec.sends_and_recvs.pipeline_steps`, which the planner simulates. With one rank and
one stage, this is the forward and the backward of each microbatch in turn. Sends and receives are posted in the order
of the list, which is the same global order on all ranks, and are waited for when their tensors are needed.

The actions are F (forward), B (backward), I (backward of a stage's input alone) and W (the weight gradients that I has
deferred). After F, only its autograd graph is kept: the output is freed once it has been sent. From I to W, the inputs
of the linear layers and the gradients of their outputs are kept.
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
from kumi.nn.linear import DeferredWgrads, linears
from kumi.parallel import data_parallel, grad_sync
from kumi.parallel.mesh import Mesh
from kumi.parallel.pipeline_trace import PipelineTrace, action_start, record_action
from kumi.parallel.stage_modules import stages_of
from kumi.spec.pipeline_channels import channel_name
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

# The decoder's arguments for one microbatch, by name: tensors, `loss` if it is a function, `statistics`.
MicrobatchInputs = Mapping[str, Any]
# Kind of a tensor, the stage that computes it, microbatch.
TensorKey = tuple[str, int, int]


@dataclass(frozen=True)
class _Run:
    """A pass of all microbatches through this rank's stages, with its live tensors.

    `stages`: this rank's stages by number.
    `last`: number of the model's last stage.
    `final`: last action of each stage.
    `training`: run backward passes too.
    `trace`: receives the times of the actions; None to measure none.
    `incoming`: received tensors, and tensors that one stage of this rank computed for another.
    `outgoing`: tensors to be sent.
    `posted`: pending receives and their buffers.
    `sent`: pending sends and their tensors.
    `graphs`: (stage, microbatch) -> the input from the previous stage (None on the first), and the output's gradient
    edge, of each forward that waits for its backward.
    `deferred_wgrads`: (stage, microbatch) -> deferred weight gradients.
    `losses`, `outputs`: results of the head.
    """

    mesh: Mesh
    stages: Mapping[int, nn.Module]
    last: int
    microbatches: Sequence[MicrobatchInputs]
    final: Mapping[int, Action]
    training: bool
    trace: PipelineTrace | None
    incoming: dict[TensorKey, Tensor] = field(default_factory=dict)
    outgoing: dict[TensorKey, Tensor] = field(default_factory=dict)
    posted: dict[TensorKey, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    graphs: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = field(default_factory=dict)
    deferred_wgrads: dict[tuple[int, int], DeferredWgrads] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def train_microbatches(
    model: nn.Module, mesh: Mesh, microbatches: Sequence[MicrobatchInputs], trace: PipelineTrace | None = None
) -> Tensor:
    """Run forward and backward of `microbatches`, complete the gradients, and return the loss of this rank's tokens.

    The loss is a scalar, and 0 on ranks without the head. Each microbatch has `token_weights` or `loss`. `trace`
    receives the times of the actions.
    """
    layout = mesh.layout
    steps = pipeline_steps(layout.schedule, layout.pp, layout.stages, len(microbatches))[mesh.index("pp")]
    run = _new_run(model, mesh, microbatches, steps, training=True, trace=trace)
    _execute(run, steps)
    unfinished = [*run.graphs, *run.deferred_wgrads, *run.incoming, *run.outgoing, *run.posted]
    assert not unfinished, f"the schedule has ended, but these are unfinished: {unfinished}"
    grad_sync.finish_grad_sync(model, mesh)
    dtype = wide(next(value.dtype for value in model.parameters() if value.is_floating_point()))
    return torch.stack(run.losses).sum() if run.losses else torch.zeros((), dtype=dtype, device=mesh.device)


@torch.no_grad()
def forward_microbatches(model: nn.Module, mesh: Mesh, microbatches: Sequence[MicrobatchInputs]) -> list[Any]:
    """Return the head's result for each of `microbatches` (see `Decoder.forward`), such as log-probs or `TokenScores`;
    an empty list on ranks without the head."""
    layout = mesh.layout
    steps = forward_pipeline_steps(layout.schedule, layout.pp, layout.stages, len(microbatches))[mesh.index("pp")]
    run = _new_run(model, mesh, microbatches, steps, training=False, trace=None)
    _execute(run, steps)
    return run.outputs


def _new_run(
    model: nn.Module,
    mesh: Mesh,
    microbatches: Sequence[MicrobatchInputs],
    steps: Sequence[PipelineStep],
    *,
    training: bool,
    trace: PipelineTrace | None,
) -> _Run:
    final = {step.stage: step for step in steps if isinstance(step, Action)}
    last, stages = mesh.layout.pp * mesh.layout.stages - 1, stages_of(model)
    return _Run(mesh, stages, last, microbatches, final, training, trace)


def _execute(run: _Run, steps: Sequence[PipelineStep]) -> None:
    """Execute `steps` in order, and wait until all tensors have been sent."""
    for step in steps:
        if isinstance(step, Send):
            _send(run, step.message)
        elif isinstance(step, Receive):
            _receive(run, step.message)
        elif step.kind == "F":
            _forward(run, step)
        elif step.kind == "W":
            _compute_wgrads(run, step)
        else:
            _backward(run, step)
        _free_sent(run.sent, wait=False)
    _free_sent(run.sent, wait=True)


def _forward(run: _Run, action: Action) -> None:
    """Run the forward of a stage, and hand its output to the next stage or to the results of `run`."""
    _, number, microbatch = action
    stage, inputs = run.stages[number], dict(run.microbatches[microbatch])
    hidden = _recv_or_local(run, (ACTIVATION, number - 1, microbatch)) if number else None
    if hidden is not None:
        hidden.requires_grad_(run.training)
    start = action_start(run.trace)
    tokens = inputs.pop("input_ids")
    if number and inputs.get("position_ids") is None:
        inputs["position_ids"] = positions(tokens, inputs.get("document_ids"))
    is_last = microbatch == len(run.microbatches) - 1
    with data_parallel.sync_context(stage, run.mesh, last=is_last):
        result = stage(tokens if hidden is None else hidden, **inputs)
    out = result[0] if isinstance(result, tuple) else result
    if run.training:
        run.graphs[number, microbatch] = hidden, get_gradient_edge(out)
    if number < run.last:
        _send_or_local(run, (ACTIVATION, number, microbatch), number + 1, out.detach())
    elif run.training:
        run.losses.append(out.detach())
    else:
        run.outputs.append(result)
    record_action(run.trace, action, start)


def _backward(run: _Run, action: Action) -> None:
    """Run B or I of a stage, and hand the gradient of its input to the previous stage."""
    kind, number, microbatch = action
    grad = None if number == run.last else _recv_or_local(run, (GRADIENT, number + 1, microbatch))
    start = action_start(run.trace)
    hidden, edge = run.graphs.pop((number, microbatch))
    if kind == "B":
        with data_parallel.sync_context(run.stages[number], run.mesh, last=run.final[number] == action):
            _differentiate(edge, grad)
    else:
        run.deferred_wgrads[number, microbatch] = _backward_input(run, number, edge, grad)
    if hidden is not None:
        assert hidden.grad is not None
        _send_or_local(run, (GRADIENT, number, microbatch), number - 1, hidden.grad)
    record_action(run.trace, action, start)


def _backward_input(run: _Run, number: int, edge: GradientEdge, grad: Tensor | None) -> DeferredWgrads:
    """Compute the gradients of a stage's inputs, and return its deferred weight gradients."""
    deferred: DeferredWgrads = []
    stage = run.stages[number]
    layers = linears(stage)
    for layer in layers:
        layer.deferred_wgrads = deferred
    with data_parallel.input_grad_context(stage, run.mesh):
        _differentiate(edge, grad)
    for layer in layers:
        layer.deferred_wgrads = None
    return deferred


def _compute_wgrads(run: _Run, action: Action) -> None:
    """Compute and reduce the weight gradients that I has deferred."""
    _, number, microbatch = action
    start = action_start(run.trace)
    deferred = run.deferred_wgrads.pop((number, microbatch))
    while deferred:
        deferred.pop()()
    data_parallel.reduce_deferred_wgrads(run.stages[number], run.mesh, last=run.final[number] == action)
    record_action(run.trace, action, start)


def _differentiate(edge: GradientEdge, grad: Tensor | None) -> None:
    torch.autograd.backward((edge,), (grad,))


def _recv_or_local(run: _Run, key: TensorKey) -> Tensor:
    """Return a tensor of a neighbouring stage: wait for its receive, or take it from a stage on this rank."""
    if key in run.posted:
        request, tensor = run.posted.pop(key)
        request.wait()
        return tensor
    return run.incoming.pop(key)


def _send_or_local(run: _Run, key: TensorKey, target: int, tensor: Tensor) -> None:
    """Store `tensor` for stage `target` if that stage is on this rank, else for the send to it."""
    (run.incoming if target in run.stages else run.outgoing)[key] = tensor


def _send(run: _Run, message: Message) -> None:
    """Begin to send the tensor of `message`."""
    tensor = run.outgoing.pop(message[:3]).contiguous()  # isend ignores strides
    request = dist.isend(tensor, group=_group(run.mesh, message), group_dst=message.target)
    assert request is not None
    run.sent.append((request, tensor))


def _receive(run: _Run, message: Message) -> None:
    """Begin to receive the tensor of `message` into a new buffer."""
    decoder: Any = next(iter(run.stages.values()))
    shape = hidden_shape(run.microbatches[message.microbatch], decoder.spec.hidden_size, run.mesh)
    buffer = torch.empty(shape, dtype=decoder.compute_dtype, device=run.mesh.device)
    request = dist.irecv(buffer, group=_group(run.mesh, message), group_src=message.source)
    assert request is not None
    run.posted[message[:3]] = request, buffer


def _group(mesh: Mesh, message: Message) -> dist.ProcessGroup | None:
    """Return the group that sends `message`: that of its channel on GPUs, that of the stages on CPUs."""
    channel = channel_name(message.kind, message.source, message.target, mesh.layout.pp)
    return mesh.group(channel) or mesh.group("pp")


def hidden_shape(inputs: MicrobatchInputs, hidden_size: int, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of hidden states between stages: (B, S, D), or the rank's tokens (T / tp, D) under sequence
    parallelism."""
    rows, length = inputs["input_ids"].shape
    if mesh.layout.tp > 1 and mesh.layout.sequence_parallel:
        return (rows * length // mesh.layout.tp, hidden_size)
    return (rows, length, hidden_size)


def _free_sent(sent: list[tuple[dist.Work, Tensor]], *, wait: bool) -> None:
    """Free the tensors of completed sends; with `wait`, wait for all sends."""
    pending = []
    for request, tensor in sent:
        if wait or request.is_completed():
            request.wait()
        else:
            pending.append((request, tensor))
    sent[:] = pending
