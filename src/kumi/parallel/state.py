"""The model's and the optimizer's tensors as pieces of global tensors, for saving and for filling.

    model/<parameter>    optim/<parameter>/exp_avg    optim/<parameter>/exp_avg_sq    optim/<parameter>/step

Names and global shapes do not depend on the layout, so a checkpoint of one layout can be read by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from kumi.parallel.data import bare
from kumi.parallel.grads import local
from kumi.parallel.mesh import Mesh
from kumi.parallel.optimizer import AdamW
from kumi.spec.sharding import shard_rows
from kumi.storage.write import Piece

# read(name, start, shape): that part of the global tensor `name`.
Reader = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]


def model_pieces(model: nn.Module) -> list[Piece]:
    """This rank's part of every parameter. `data` is the parameter's own memory; empty parts are left out."""
    named = ((f"model/{name}", parameter) for name, parameter in bare(model).named_parameters())
    return [piece for name, parameter in named if (piece := piece_of(name, parameter)).data.numel()]


def optimizer_pieces(model: nn.Module, optimizer: AdamW) -> list[Piece]:
    """This rank's part of every optimizer state of the trained parameters. `data` is the state's own memory."""
    return [piece for piece in _optimizer_pieces(model, optimizer) if piece.data.numel()]


def _optimizer_pieces(model: nn.Module, optimizer: AdamW) -> Iterator[Piece]:
    for name, parameter in bare(model).named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            yield piece_of(f"optim/{name}/{key}", value)


def piece_of(name: str, tensor: Tensor) -> Piece:
    """What this rank holds of `tensor`, a DTensor cut along dim 0 at most, or a plain one, as a piece of the whole."""
    data = local(tensor.detach())
    shape, start = tuple(tensor.shape), [0] * tensor.ndim
    mesh = getattr(tensor, "device_mesh", None)
    for axis, placement in enumerate(getattr(tensor, "placements", ())):
        if mesh is not None and placement.is_shard():
            assert placement.dim == 0, f"{name} is cut along dim {placement.dim}"
            start[0] = shard_rows(shape[0], mesh.size(axis), mesh.get_local_rank(axis)).start
    return Piece(name, shape, tuple(start), data)


def owned(pieces: list[Piece], mesh: Mesh) -> list[Piece]:
    """The `pieces` that this rank saves, so that every part of every tensor is saved by exactly one rank.

    Ranks with equal parts share them out by bytes. Pure arithmetic on names, shapes and the layout: nothing is sent.
    """
    layout = mesh.layout
    whole = [piece for piece in pieces if layout.zero == 0 or piece.shape == ()]  # step counters are never divided
    divided = [piece for piece in pieces if layout.zero > 0 and piece.shape != ()]
    replica = layout.coords(mesh.rank)["dp_replicate"]
    return [*_share(whole, layout.dp, layout.dp_index(mesh.rank)), *_share(divided, layout.dp_replicate, replica)]


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
