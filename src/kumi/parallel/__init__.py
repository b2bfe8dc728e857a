"""Modules onto a mesh.

    place = init_distributed("cpu")
    mesh = build_mesh(layout, place)
    model = build(spec, mesh, precision, weights=seed)
    optimizer = build_optimizer(model, mesh, optim)

    loss = forward_backward(model, mesh, batches, tokens)     # a step: this rank's sum over tokens / tokens of the step
    norm = clip_gradients(model, optim.grad_clip, mesh)
    optimizer.step()
    forget_gradients(model, optimizer)

    owned([*model_pieces(model, mesh), *optimizer_pieces(model, optimizer, mesh)], model, mesh, optim)  # what it saves

mesh: ranks, axes, groups. build: the order of assembly. data: DDP and FSDP2. recompute: activation checkpointing.
forward_backward: the gradients of a step. pipeline: microbatches through stages. stages: those of this rank.
record: what it did when.
grads: global norm, clipping, loss scale. optim: optimizers. state: tensors as pieces of global ones.
"""

from kumi.parallel import pipeline
from kumi.parallel.build import build
from kumi.parallel.data_parallel import bare
from kumi.parallel.grad_norm import LossScale, clip_gradients
from kumi.parallel.mesh import Mesh, Place, barrier, build_mesh, close_distributed, greatest, init_distributed, total
from kumi.parallel.optim import build_optimizer
from kumi.parallel.optim.adamw import init_adamw
from kumi.parallel.state_tensors import fill, model_pieces, optimizer_pieces, owned

__all__ = [
    "LossScale",
    "Mesh",
    "Place",
    "bare",
    "barrier",
    "build",
    "build_mesh",
    "build_optimizer",
    "clip_gradients",
    "close_distributed",
    "fill",
    "greatest",
    "init_adamw",
    "init_distributed",
    "model_pieces",
    "optimizer_pieces",
    "owned",
    "pipeline",
    "total",
]
