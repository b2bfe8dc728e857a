"""Fill the packed matrices of a sharded model (see `kumi.nn.nf4`).

A packed matrix has a 4-bit code for each weight and a scale for each block of `NF4_BLOCK` consecutive weights. A
tensor-parallel rank packs its part of a matrix, so a block begins with that part. `kumi.spec.layout_rules` lets tp
shard a packed matrix only between blocks of the complete matrix, and ZeRO-3 shards the blocks. The codes are therefore
the same in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from kumi.nn.nf4 import NF4Matrix, pack_blocks, packed_matrices
from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import local_shard, params_by_name, stages_of
from kumi.parallel.state_tensors import PieceReader
from kumi.spec.lora import NF4_BLOCK
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.shard_slices import Slice, slices
from kumi.spec.sharding import packed_rows


@torch.no_grad()
def fill_packed_matrices(model: nn.Module, spec: ModelSpec, mesh: Mesh, dtype: torch.dtype, base: PieceReader) -> None:
    """Read and pack this rank's blocks, one matrix at a time. The weights come from `base`, and are rounded to `dtype`
    before they are packed."""
    params = params_by_name(spec)
    for stage in stages_of(model).values():
        for name, packed in packed_matrices(stage).items():
            _fill(packed, params[f"{name}.weight"], mesh, dtype, base)


def _fill(packed: NF4Matrix, param: Param, mesh: Mesh, dtype: torch.dtype, base: PieceReader) -> None:
    """Fill this rank's blocks of the matrix `packed` of the parameter `param`."""
    columns, blocks = packed.shape[1], packed_rows(packed.shape, mesh.layout, mesh.rank)
    if not blocks.count:
        return
    first = blocks.start * NF4_BLOCK
    last = min(first + blocks.count * NF4_BLOCK, packed.shape[0] * columns)
    rows = _rows(param, first // columns, -(-last // columns), columns, mesh, base)
    values = rows.view(-1)[first % columns :][: last - first]
    codes, scales = pack_blocks(values.to(mesh.device, dtype).to(packed.dtype))
    for parameter, content in ((packed.codes, codes), (packed.scales, scales)):
        local_shard(parameter.detach()).copy_(content)


def _rows(param: Param, first: int, last: int, columns: int, mesh: Mesh, base: PieceReader) -> Tensor:
    """Return the rows [first, last) of this rank's tensor-parallel shard of `param`, contiguous."""
    parts = [base(f"model/{param.name}", part.start, part.shape) for part in _parts(param, first, last, mesh)]
    rows = parts[0] if len(parts) == 1 else torch.cat(parts)
    assert rows.shape == (last - first, columns), f"{param.name}: {tuple(rows.shape)} of {last - first} rows"
    return rows.contiguous()


def _parts(param: Param, first: int, last: int, mesh: Mesh) -> Iterator[Slice]:
    """Yield the slices of `param` with the rows [first, last) of this rank's tensor-parallel shard, in order."""
    for part in slices(param, replace(mesh.layout, zero=0), mesh.rank):
        begin = max(part.local[0], first)
        count = min(part.local[0] + part.shape[0], last) - begin
        if count > 0:
            start = (part.start[0] + begin - part.local[0], part.start[1])
            yield Slice(start, (begin, part.local[1]), (count, part.shape[1]))
