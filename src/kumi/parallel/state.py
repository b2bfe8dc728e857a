"""The model's and the optimizer's tensors as pieces of global tensors, for saving and for filling.

    model/<parameter>    optim/<parameter>/exp_avg    optim/<parameter>/exp_avg_sq    optim/<parameter>/step

Names and global shapes do not depend on the layout, so a checkpoint of one layout can be read by another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor, nn

from kumi.nn import init
from kumi.parallel.data import bare
from kumi.parallel.grads import by_name, local
from kumi.parallel.mesh import Mesh
from kumi.parallel.optimizer import Optimizer
from kumi.spec.ledger import buffers
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.placement import Axis, axis
from kumi.spec.regions import copies, regions, tied_copies
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
        for key, value in optimizer.state.get(parameter, {}).items():
            if value.ndim == 0:  # the step counter, which is never divided
                yield Piece(f"optim/{name}/{key}", (), (), local(value.detach()))
            else:
                yield from pieces_of(f"optim/{name}/{key}", known[name], value, mesh)


def pieces_of(name: str, param: Param, tensor: Tensor, mesh: Mesh) -> Iterator[Piece]:
    """What this rank holds of `tensor`, a value for every element of `param`, as pieces of the whole."""
    data = local(tensor.detach())
    for region in regions(param, mesh.layout, mesh.rank):
        part = tuple(slice(first, first + size) for first, size in zip(region.local, region.shape, strict=True))
        yield Piece(name, param.shape, region.start, data[part])


def owned(pieces: list[Piece], model: nn.Module, mesh: Mesh) -> list[Piece]:
    """The `pieces` that this rank saves, so that every part of every tensor is saved by exactly one rank.

    Ranks with equal parts share them out by bytes. Pure arithmetic on names, shapes and the layout: nothing is sent.
    """
    spec, alike = spec_of(model), defaultdict(list)
    known = by_name(spec)
    for piece in pieces:
        param = known[parameter_name(piece.name)]
        alike[(*_holders(piece, param, spec, mesh), *tied_copies(spec, param, mesh.layout))].append(piece)
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


def _holders(piece: Piece, param: Param, spec: ModelSpec, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes along which ranks hold what is in `piece`: all, of step counters and buffers."""
    if piece.shape and param not in buffers(spec):
        return copies(param, mesh.layout)
    every = (axis(mesh.layout, name) for name in ("dp_replicate", "zero", "tp"))
    return tuple(one for one in every if one.degree > 1)


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
            init.fill(piece.data, param, piece.start, std=spec.initializer_range, seed=seed)
