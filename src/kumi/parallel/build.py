"""A decoder laid onto the mesh, weights in place, ready to train.

meta device -> recompute -> compile -> divide (FSDP2) -> memory -> weights -> replicate (DDP). What is cut along further
axes (tensor, expert, context, pipeline) comes before recompute.
"""

from __future__ import annotations

import torch
from torch import nn

from kumi.nn.decoder import Decoder
from kumi.parallel import data
from kumi.parallel.mesh import Mesh
from kumi.parallel.recompute import recompute_layers
from kumi.parallel.state import Reader, draw, fill, model_pieces
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision


def build(
    spec: ModelSpec, mesh: Mesh, precision: Precision, *, weights: int | Reader, compile: bool = False
) -> nn.Module:
    """The decoder of `spec` on `mesh`, called like `kumi.nn.Decoder`; a rank holds its own part of it only.

    `weights` is a seed, from which every layout draws the same values, or a function that reads one part of a tensor,
    `weights("model/<parameter>", start, shape)`. Nothing is communicated, so ranks need not keep step here.
    `compile` compiles each layer by itself: equal layers share what was compiled.
    """
    decoder = Decoder(spec, device="meta", dtype=getattr(torch, precision.param))
    decoder.compute_dtype = getattr(torch, precision.compute)
    recompute_layers(decoder.model.layers.values(), mesh.layout.recompute)
    if compile:
        for layer in decoder.model.layers.values():
            layer.compile()
    divided = data.is_divided(mesh)
    if divided:
        data.shard(decoder, mesh, precision)
    decoder.to_empty(device=mesh.device)
    pieces = model_pieces(decoder, mesh)
    if isinstance(weights, int):
        draw(pieces, spec, weights)
    else:
        fill(pieces, weights)
    return decoder if divided or mesh.alone else data.replicate(decoder, mesh, precision)
