"""The weights of a model in training, as Hugging Face names and tensors, to whoever wants them while it trains.

for name, tensor in export_tensors(model, mesh, dtype=torch.bfloat16):
    engine.load_weights([(name, tensor)])        # such as an inference engine that samples for reinforcement learning
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.convert.rectangles import overlap
from kumi.errors import ModelError
from kumi.parallel.mesh import Mesh
from kumi.parallel.state import model_pieces, owned, spec_of
from kumi.spec.ledger import buffers
from kumi.spec.weights import Part, files
from kumi.storage.write import Piece

_PREFIX = "model/"


@torch.no_grad()
def export_tensors(
    model: nn.Module, mesh: Mesh, *, dtype: torch.dtype | None = None, to: str = "all"
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the Hugging Face files of `model` have, with its name there, put together from all ranks.

    All ranks must iterate, to the end: each step is a collective over all of them, whatever the layout. They get the
    same names in the same order, and the same whole tensors on their devices; with `to="first"` only rank 0 gets the
    tensors, the others empty ones. Parameters are cast to `dtype` before they are sent; without it, and of buffers, the
    bits are those that are trained. A rank holds one tensor of the files at a time besides the model. Each tensor is
    new memory that the caller may keep. What the files have besides (`kumi.convert.carried`) does not change in
    training and is not sent.
    """
    spec = spec_of(model)
    if to not in ("all", "first"):
        raise ModelError(f"export to {to!r}: tensors go to 'all' ranks, or to the 'first'")
    if spec.lora is not None:
        raise ModelError("a model with adapters is exported when they are merged: it has tensors that files do not")
    mine = owned(model_pieces(model, mesh), model, mesh)
    held: dict[str, list[Piece]] = {}
    for piece in mine:
        held.setdefault(piece.name.removeprefix(_PREFIX), []).append(piece)
    trained = dtype or next(parameter.dtype for parameter in model.parameters())
    own = {param.name: torch.float32 for param in buffers(spec)}
    for name, made_of in files(spec).items():
        kind = own.get(made_of[0].param.name, trained)
        whole: Tensor | None = None
        for param, part in ((one.param, one.part) for one in made_of):
            data = _gathered(held.get(param.name, []), part, kind, mesh, to)
            if part.is_whole:
                whole = data.view(part.shape)
            else:
                whole = torch.empty(part.shape, dtype=kind, device=mesh.device) if whole is None else whole
                _place(whole, part, data)
        assert whole is not None, f"{name} is made of nothing"
        yield name, whole if to == "all" or mesh.rank == 0 else torch.empty(0, dtype=kind, device=mesh.device)


def _gathered(held: list[Piece], part: Part, dtype: torch.dtype, mesh: Mesh, to: str) -> Tensor:
    """The native rectangle that `part` is of, of which this rank gives what it has in `held`.

    Ranks' bits are added, and nothing else is set where a rank has nothing: no rounding, and zeros keep their signs.
    """
    out = torch.zeros(part.extent, dtype=dtype, device=mesh.device)
    for piece in held:
        found = overlap(part.start, part.extent, piece.start, tuple(piece.data.shape))
        if found:
            first, size = found
            into = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, part.start, size))
            out[into] = piece.data[tuple(slice(a - b, a - b + n) for a, b, n in zip(first, piece.start, size))].to(
                dtype
            )
    if mesh.layout.world_size > 1:
        whole_words = prod(part.extent) * dtype.itemsize % 4 == 0
        bits = out.view(-1).view(torch.int32 if whole_words else torch.uint8)
        if to == "all":
            dist.all_reduce(bits)
        else:
            dist.reduce(bits, dst=0)
    return out


def _place(whole: Tensor, part: Part, data: Tensor) -> None:
    """Write a native rectangle to its place in the file's tensor."""
    inside = whole.view(part.view)[tuple(slice(low, low + count) for low, count in zip(part.at, part.size))]
    ordered = inside.permute(part.order)
    ordered.copy_(data.view(ordered.shape))
