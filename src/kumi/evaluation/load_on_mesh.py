"""Load a model to evaluate onto the ranks of a layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kumi.convert import merge
from kumi.inference.load_model import load_files
from kumi.inference.model_files import ModelFiles
from kumi.parallel.build import build
from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import unwrap
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision


def load_on_mesh(files: ModelFiles, mesh: Mesh, dtype: str) -> nn.Module:
    """Return this rank's part of the model in `files`, its weights and activations in `dtype`.

    On one rank, adapters stay separate modules. On several, they are merged into the weights as these are read.
    """
    if mesh.is_single:
        return load_files(files, dtype=dtype, device=mesh.device).decoder
    source = files.source
    if files.adapted is not None:
        source = merge.open_merged(files.folder, str(files.source.folder))

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return source.reader.read(name.removeprefix("model/"), start, shape)

    precision = Precision("evaluation", dtype, dtype, dtype)
    # Without DDP, which would allocate gradients.
    module = unwrap(build(source.spec, mesh, precision, weights=read))
    return module.eval().requires_grad_(False)


def context_length(spec: ModelSpec, given: int | None) -> int:
    """Return the number of tokens that a model reads at most: `given`, or the limit of its configuration if lower."""
    limit = spec.learned_positions or spec.max_position_embeddings
    return limit if given is None else min(given, limit)


def device_type() -> str:
    """Return "cuda" if this machine has a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
