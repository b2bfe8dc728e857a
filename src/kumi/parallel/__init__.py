"""Build a model on a mesh of ranks, and train it.

    mesh = build_mesh(layout, init_distributed("cpu"))
    model = build(spec, mesh, precision, weights=seed)
    optimizer = build_optimizer(model, mesh, optim)

    # In kumi.parallel.run_microbatches. `units`: the number of tokens, pairs ... over which the step's loss is a mean.
    loss = forward_backward(model, mesh, objective, batches, units)     # this rank's part of the loss of a step
    norm = clip_gradients(model, optim.grad_clip, mesh)
    optimizer.step()
    clear_grads(model, optimizer)                       # in kumi.parallel.optim.optimizer

    pieces = [*model_pieces(model, mesh), *optimizer_pieces(model, optimizer, mesh)]    # slices of global tensors
    owned_pieces(pieces, model, mesh, optim)                            # the pieces that this rank saves

`mesh`: ranks, axes, process groups. `build`: the order of assembly. `data_parallel`: DDP and FSDP2.
`run_microbatches`: the gradients of a step. `pipeline`: runs microbatches through the stages. `pipeline_trace`: the
times of a pipeline's actions. `stage_modules`: the stages of this rank. `grad_norm`: global norm, clipping, loss scale.
`optim`: optimizers. `state_tensors`: tensors as pieces of global tensors.
"""

from kumi.parallel import pipeline
from kumi.parallel.build import build
from kumi.parallel.grad_norm import LossScale, clip_gradients
from kumi.parallel.mesh import (
    Mesh,
    RankInfo,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    build_mesh,
    close_distributed,
    init_distributed,
)
from kumi.parallel.optim import build_optimizer
from kumi.parallel.optim.adamw import init_adamw
from kumi.parallel.stage_modules import unwrap
from kumi.parallel.state_tensors import fill_pieces, model_pieces, optimizer_pieces, owned_pieces

__all__ = [
    "LossScale",
    "Mesh",
    "RankInfo",
    "all_reduce_max",
    "all_reduce_sum",
    "barrier",
    "build",
    "build_mesh",
    "build_optimizer",
    "clip_gradients",
    "close_distributed",
    "fill_pieces",
    "init_adamw",
    "init_distributed",
    "model_pieces",
    "optimizer_pieces",
    "owned_pieces",
    "pipeline",
    "unwrap",
]
