"""Export the weights of a model during training, as Hugging Face names and tensors, from any layout.

for name, tensor in export_tensors(model, mesh, dtype=torch.bfloat16):
    engine.load_weights([(name, tensor)])        # such as an inference engine that samples for reinforcement learning
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.convert.files.slices import overlap
from kumi.errors import ModelError
from kumi.parallel.mesh import Mesh
from kumi.parallel.state_tensors import model_pieces, owned_pieces, spec_of
from kumi.spec.ledger import buffers
from kumi.spec.weights import Part, stored_tensors
from kumi.storage.write import Piece

# Pieces (slices of global tensors) of the parameter p have the name model/p.
_PREFIX = "model/"


@torch.no_grad()
def export_tensors(
    model: nn.Module, mesh: Mesh, *, dtype: torch.dtype | None = None, to: str = "all"
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor of `model` with its name, gathered from all ranks.

    All ranks must iterate to the end: each step is a collective over all of them. Every rank gets the same names in the
    same order, and the same complete tensors on its device; with `to="first"` only rank 0 gets the tensors, the others
    get empty ones.

    Parameters are cast to `dtype` before they are sent. Without `dtype`, and for buffers, tensors are exactly those in
    training. A rank holds one exported tensor at a time in addition to the model; the caller may keep the tensor.
    Passthrough tensors (`kumi.convert.hf.passthrough`) do not change in training and are not exported.

    Raise ModelError for an unknown `to`, or for a model with adapters.
    """
    spec = spec_of(model)
    if to not in ("all", "first"):
        raise ModelError(f"to={to!r}: tensors go to 'all' ranks or the 'first' one; choose one of these")
    if spec.lora is not None:
        raise ModelError(
            "the model has adapters, and Hugging Face files have no tensors for these; merge them before exporting"
        )
    by_name: dict[str, list[Piece]] = {}
    for piece in owned_pieces(model_pieces(model, mesh), model, mesh):
        by_name.setdefault(piece.name.removeprefix(_PREFIX), []).append(piece)
    trained_dtype = dtype or next(parameter.dtype for parameter in model.parameters())
    buffer_dtypes = {param.name: torch.float32 for param in buffers(spec)}
    for name, stored_parts in stored_tensors(spec).items():
        tensor_dtype = buffer_dtypes.get(stored_parts[0].param.name, trained_dtype)
        result: Tensor | None = None
        for param, part in ((stored.param, stored.part) for stored in stored_parts):
            data = _gather(by_name.get(param.name, []), part, tensor_dtype, mesh, to)
            if part.is_whole:
                result = data.view(part.shape)
            else:
                result = torch.empty(part.shape, dtype=tensor_dtype, device=mesh.device) if result is None else result
                _write_part(result, part, data)
        assert result is not None, f"{name} has no parameter of the model"
        yield name, result if to == "all" or mesh.rank == 0 else torch.empty(0, dtype=tensor_dtype, device=mesh.device)


def _gather(pieces: list[Piece], part: Part, dtype: torch.dtype, mesh: Mesh, to: str) -> Tensor:
    """Return the slice of the model's parameter that `part` names, gathered from the pieces of all ranks.

    Ranks sum the integer bits of disjoint pieces, with zeros elsewhere: no rounding, and signed zeros are preserved.
    """
    out = torch.zeros(part.extent, dtype=dtype, device=mesh.device)
    for piece in pieces:
        common = overlap(part.start, part.extent, piece.start, tuple(piece.data.shape))
        if common:
            first, size = common
            target = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, part.start, size))
            out[target] = piece.data[tuple(slice(a - b, a - b + n) for a, b, n in zip(first, piece.start, size))].to(
                dtype
            )
    if mesh.layout.world_size > 1:
        word_aligned = prod(part.extent) * dtype.itemsize % 4 == 0
        bits = out.view(-1).view(torch.int32 if word_aligned else torch.uint8)
        if to == "all":
            dist.all_reduce(bits)
        else:
            dist.reduce(bits, dst=0)
    return out


def _write_part(file_tensor: Tensor, part: Part, data: Tensor) -> None:
    """Write `data`, a slice of a parameter, to its place in the tensor of the file."""
    region = file_tensor.view(part.view)[tuple(slice(low, low + count) for low, count in zip(part.at, part.size))]
    ordered = region.permute(part.order)
    ordered.copy_(data.view(ordered.shape))
