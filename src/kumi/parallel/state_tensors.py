"""The model's and the optimizer's tensors as pieces of global tensors, for saving and for filling.

    model/<parameter>    optim/<parameter>/<state>    as kumi.spec.optim_states names them, of AdamW exp_avg and so on

Names and global shapes do not depend on the layout, so a checkpoint of one layout can be read by another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from kumi.nn import initialize
from kumi.parallel.data_parallel import bare
from kumi.parallel.grad_norm import by_name, local
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.optimizer import Optimizer
from kumi.spec.layout import Layout
from kumi.spec.ledger import buffers
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import states_of
from kumi.spec.process_groups import Axis, axis
from kumi.spec.shard_slices import replica_axes, slices, tied_axes
from kumi.storage.write import Piece

# read(name, start, shape): that part of the global tensor `name`.
Reader = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]


def spec_of(model: nn.Module) -> ModelSpec:
    """What the decoder is that `model` holds, whole or in part."""
    spec: ModelSpec = bare(model).spec  # type: ignore[assignment]
    return spec


def model_pieces(model: nn.Module, mesh: Mesh) -> list[Piece]:
    """This rank's part of every parameter, and the buffers, which are never divided. `data` is their own memory; empty
    parts are left out."""
    known = by_name(spec_of(model))
    named = bare(model).named_parameters()
    pieces = [piece for name, value in named for piece in pieces_of(f"model/{name}", known[name], value, mesh)]
    whole = ((name, value) for name, value in bare(model).named_buffers() if name in known)
    return [*pieces, *(Piece(f"model/{name}", tuple(value.shape), (0,) * value.ndim, value) for name, value in whole)]


def optimizer_pieces(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[Piece]:
    """This rank's part of every optimizer state of the trained parameters. `data` is the state's own memory."""
    return list(_optimizer_pieces(model, optimizer, mesh))


def _optimizer_pieces(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> Iterator[Piece]:
    known = by_name(spec_of(model))
    for name, parameter in bare(model).named_parameters():
        values = optimizer.state.get(parameter)
        if values is None:
            continue
        for state in states_of(optimizer.optim, known[name]):
            tensor = f"optim/{name}/{state.name}"
            yield from pieces_of(tensor, state.tensor, values[state.name], mesh, sharded=state.sharded)


def pieces_of(name: str, param: Param, tensor: Tensor, mesh: Mesh, *, sharded: bool = True) -> Iterator[Piece]:
    """What this rank holds of `tensor`, a value for every element of `param`, as pieces of the whole. ZeRO shards it
    unless `sharded` is false."""
    data = local(tensor.detach())
    for region in slices(param, _layout(mesh, sharded), mesh.rank):
        part = tuple(slice(first, first + size) for first, size in zip(region.local, region.shape, strict=True))
        yield Piece(name, param.shape, region.start, data[part])


def _layout(mesh: Mesh, sharded: bool) -> Layout:
    """The layout of the mesh, for what ZeRO does not shard without ZeRO."""
    return mesh.layout if sharded else replace(mesh.layout, zero=0)


def owned(pieces: list[Piece], model: nn.Module, mesh: Mesh, optim: Optim | None = None) -> list[Piece]:
    """The `pieces` that this rank saves, so that every part of every tensor is saved by exactly one rank.

    `optim` is the optimizer whose states are among the pieces, None where there are none.

    Ranks with equal parts share them out by bytes. Pure arithmetic on names, shapes and the layout: nothing is sent.
    """
    spec, alike = spec_of(model), defaultdict(list)
    known = by_name(spec)
    for piece in pieces:
        param = known[parameter_name(piece.name)]
        holders = _holders(piece, param, spec, mesh, optim)
        alike[(*holders, *tied_axes(spec, param, mesh.layout))].append(piece)
    kept = []
    for axes, same in alike.items():
        mine = 0
        for one in axes:
            mine = mine * one.degree + one.index(mesh.rank)
        kept += _share(same, prod(one.degree for one in axes), mine)
    return kept


def parameter_name(piece: str) -> str:
    """The parameter that a piece's tensor belongs to."""
    kind, _, rest = piece.partition("/")
    return rest if kind == "model" else rest.rpartition("/")[0]


def _holders(piece: Piece, param: Param, spec: ModelSpec, mesh: Mesh, optim: Optim | None) -> tuple[Axis, ...]:
    """The axes along which ranks hold what is in `piece`: all, of buffers."""
    if param in buffers(spec):
        every = (axis(mesh.layout, name) for name in ("dp_replicate", "zero", "tp"))
        return tuple(one for one in every if one.degree > 1)
    if piece.name.startswith("model/"):
        return replica_axes(param, mesh.layout)
    assert optim is not None, f"{piece.name} is a state of an optimizer that the caller does not name"
    states = {state.name: state for state in states_of(optim, param)}
    state = states[piece.name.rpartition("/")[2]]
    return replica_axes(state.tensor, _layout(mesh, state.sharded))


def _share(pieces: list[Piece], ranks: int, mine: int) -> list[Piece]:
    """The pieces of rank `mine` when the largest piece left goes to the rank with the fewest bytes, again and again."""
    load = [0] * ranks
    kept = []
    for piece in sorted(pieces, key=lambda piece: (-piece.data.nbytes, piece.name)):
        rank = load.index(min(load))
        load[rank] += piece.data.nbytes
        if rank == mine:
            kept.append(piece)
    return kept


def fill(pieces: list[Piece], read: Reader) -> None:
    """Fills the memory of every piece with what `read` returns for it."""
    with torch.no_grad():
        for piece in pieces:
            piece.data.copy_(read(piece.name, piece.start, tuple(piece.data.shape)))


def draw(pieces: list[Piece], spec: ModelSpec, seed: int) -> None:
    """Fills the memory of every parameter's piece with its initial values, the same in every layout."""
    known = by_name(spec)
    with torch.no_grad():
        for piece in pieces:
            param = known[parameter_name(piece.name)]
            initialize.fill(piece.data, param, piece.start, std=spec.initializer_range, seed=seed)
