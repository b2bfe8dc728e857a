"""A decoder laid onto the mesh, weights in place, ready to train.

meta device -> recompute -> divide (FSDP2) -> memory -> weights -> replicate (DDP). What is cut along further axes
(tensor, expert, context, pipeline) comes before recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from kumi.nn.decoder import Decoder
from kumi.nn.init import fill as draw
from kumi.parallel import data
from kumi.parallel.mesh import Mesh
from kumi.parallel.recompute import recompute_layers
from kumi.parallel.state import Piece, Reader, fill, model_pieces
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision


def build(spec: ModelSpec, mesh: Mesh, precision: Precision, *, weights: int | Reader) -> nn.Module:
    """The decoder of `spec` on `mesh`, called like `kumi.nn.decoder.Decoder`; a rank holds its own part of it only.

    `weights` is a seed, from which every layout draws the same values, or a function that reads one part of a tensor,
    `weights("model/<parameter>", start, shape)`. Nothing is communicated, so ranks need not keep step here.
    """
    decoder = Decoder(spec, device="meta", dtype=getattr(torch, precision.param))
    decoder.compute_dtype = getattr(torch, precision.compute)
    read = partial(_drawn, spec, weights) if isinstance(weights, int) else weights
    return assemble(decoder, mesh, precision, lambda pieces: fill(pieces, read))


def _drawn(spec: ModelSpec, seed: int, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The part of parameter `name` that a random start gives, the same for every layout."""
    return draw(spec, name.removeprefix("model/"), seed, start=start[0], rows=shape[0])


def assemble(decoder: Decoder, mesh: Mesh, precision: Precision, fill: Callable[[list[Piece]], None]) -> nn.Module:
    """`decoder`, which is on the meta device, on `mesh` with the weights that `fill` writes into its pieces."""
    recompute_layers(decoder.model.layers, mesh.layout.recompute)
    divided = mesh.layout.zero > 0 and mesh.axes is not None
    if divided:
        data.shard(decoder, _units(decoder), mesh, precision)
    _allocate(decoder, mesh.device)
    fill(model_pieces(decoder))
    if divided or mesh.axes is None:
        return decoder
    return data.replicate(decoder, mesh, precision)


def _units(decoder: Decoder) -> list[nn.Module]:
    """What is gathered as one piece: the embedding unless the head shares it, and every layer."""
    tied = decoder.lm_head.weight is decoder.model.embed_tokens.weight
    embedding = [] if tied else [decoder.model.embed_tokens]
    return [*embedding, *decoder.model.layers]


def _allocate(decoder: nn.Module, device: torch.device) -> None:
    """Gives every parameter memory on `device`; a parameter that two modules share stays shared."""
    names = dict(decoder.named_parameters(remove_duplicate=False))
    first = {parameter: name for name, parameter in reversed(names.items())}
    decoder.to_empty(device=device)
    for name, parameter in names.items():
        if first[parameter] != name:
            module, _, key = name.rpartition(".")
            setattr(decoder.get_submodule(module), key, decoder.get_parameter(first[parameter]))
