"""The tensors of model and optimizer as pieces of global tensors, to save and to fill them.

A global tensor is the unsharded tensor; a piece is a rectangle of it, with the name of the tensor:

    model/<parameter>    optim/<parameter>/<state>    states are named by kumi.spec.optim_states, for AdamW exp_avg ...

Names and global shapes do not depend on the layout, so a checkpoint of one layout can be read in another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from kumi.nn import initialize
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.optimizer import Optimizer
from kumi.parallel.stage_modules import local_shard, params_by_name, unwrap
from kumi.spec.layout import Layout
from kumi.spec.ledger import buffers
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import states_of
from kumi.spec.process_groups import Axis, axis
from kumi.spec.shard_slices import replica_axes, slices, tied_axes
from kumi.storage.write import Piece

# read(name, start, shape) -> this slice of the global tensor `name`.
PieceReader = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]


def spec_of(model: nn.Module) -> ModelSpec:
    """Return the spec of the decoder or stages in `model`."""
    spec: ModelSpec = unwrap(model).spec  # type: ignore[assignment]
    return spec


def model_pieces(model: nn.Module, mesh: Mesh) -> list[Piece]:
    """Return this rank's pieces of the parameters, and the buffers, which are never sharded.

    The pieces share the tensors' memory. Empty shards have no pieces. Neither have packed matrices: they are frozen,
    and their memory does not have the parameter's elements.
    """
    params = params_by_name(spec_of(model))
    named = ((name, value) for name, value in unwrap(model).named_parameters() if name in params)
    pieces = [piece for name, value in named for piece in local_pieces(f"model/{name}", params[name], value, mesh)]
    named_buffers = ((name, value) for name, value in unwrap(model).named_buffers() if name in params)
    return [
        *pieces,
        *(Piece(f"model/{name}", tuple(value.shape), (0,) * value.ndim, value) for name, value in named_buffers),
    ]


def optimizer_pieces(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[Piece]:
    """Return this rank's pieces of the optimizer states of trained parameters. They share the states' memory."""
    return list(_optimizer_pieces(model, optimizer, mesh))


def _optimizer_pieces(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> Iterator[Piece]:
    """Yield the pieces of `optimizer_pieces`, in the order of the parameters."""
    params = params_by_name(spec_of(model))
    for name, parameter in unwrap(model).named_parameters():
        values = optimizer.state.get(parameter)
        if values is None:
            continue
        for state in states_of(optimizer.optim, params[name]):
            tensor = f"optim/{name}/{state.name}"
            yield from local_pieces(tensor, state.tensor, values[state.name], mesh, sharded=state.sharded)


def local_pieces(name: str, param: Param, tensor: Tensor, mesh: Mesh, *, sharded: bool = True) -> Iterator[Piece]:
    """Yield this rank's pieces of `tensor`, which has a value for every element of `param`.

    ZeRO shards it unless `sharded` is false.
    """
    data = local_shard(tensor.detach())
    for region in slices(param, _layout(mesh, sharded), mesh.rank):
        part = tuple(slice(first, first + size) for first, size in zip(region.local, region.shape, strict=True))
        yield Piece(name, param.shape, region.start, data[part])


def _layout(mesh: Mesh, sharded: bool) -> Layout:
    """Return the mesh's layout, without ZeRO for tensors that ZeRO does not shard."""
    return mesh.layout if sharded else replace(mesh.layout, zero=0)


def owned_pieces(pieces: list[Piece], model: nn.Module, mesh: Mesh, optim: Optim | None = None) -> list[Piece]:
    """Return the `pieces` that this rank saves: every element of every tensor is saved by exactly one rank.

    Ranks with replicas of the same pieces save about the same number of bytes each. The result follows from names,
    shapes and the layout; nothing is sent. `optim`: the optimizer whose states are among the pieces, or None.
    """
    spec, by_axes = spec_of(model), defaultdict(list)
    params = params_by_name(spec)
    for piece in pieces:
        param = params[parameter_name(piece.name)]
        axes = _replica_axes(piece, param, spec, mesh, optim)
        by_axes[(*axes, *tied_axes(spec, param, mesh.layout))].append(piece)
    result = []
    for axes, replicated in by_axes.items():
        index = 0
        for each in axes:
            index = index * each.degree + each.index(mesh.rank)
        result += _assigned_pieces(replicated, prod(each.degree for each in axes), index)
    return result


def parameter_name(piece: str) -> str:
    """Return the name of the parameter that the tensor of a piece belongs to."""
    kind, _, rest = piece.partition("/")
    return rest if kind == "model" else rest.rpartition("/")[0]


def _replica_axes(piece: Piece, param: Param, spec: ModelSpec, mesh: Mesh, optim: Optim | None) -> tuple[Axis, ...]:
    """Return the axes along which ranks have replicas of `piece`; for buffers, all axes but pp."""
    if param in buffers(spec):
        axes = (axis(mesh.layout, name) for name in ("dp_replicate", "zero", "tp"))
        return tuple(each for each in axes if each.degree > 1)
    if piece.name.startswith("model/"):
        return replica_axes(param, mesh.layout)
    assert optim is not None, f"{piece.name} is an optimizer state, but `optim` is None"
    states = {state.name: state for state in states_of(optim, param)}
    state = states[piece.name.rpartition("/")[2]]
    return replica_axes(state.tensor, _layout(mesh, state.sharded))


def _assigned_pieces(pieces: list[Piece], ranks: int, index: int) -> list[Piece]:
    """Return the pieces of rank `index`: the largest remaining piece always goes to the rank with the fewest bytes."""
    load = [0] * ranks
    result = []
    for piece in sorted(pieces, key=lambda piece: (-piece.data.nbytes, piece.name)):
        rank = load.index(min(load))
        load[rank] += piece.data.nbytes
        if rank == index:
            result.append(piece)
    return result


def fill_pieces(pieces: list[Piece], read: PieceReader) -> None:
    """Fill the memory of every piece with the slice that `read` returns for it."""
    with torch.no_grad():
        for piece in pieces:
            piece.data.copy_(read(piece.name, piece.start, tuple(piece.data.shape)))


def draw_pieces(pieces: list[Piece], spec: ModelSpec, seed: int) -> None:
    """Fill the memory of every parameter's piece with its initial values, which are the same in every layout."""
    params = params_by_name(spec)
    with torch.no_grad():
        for piece in pieces:
            param = params[parameter_name(piece.name)]
            initialize.fill(piece.data, param, piece.start, std=spec.initializer_range, seed=seed)
