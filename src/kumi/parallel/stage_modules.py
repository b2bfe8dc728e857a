"""The modules and parameters of one rank: pipeline stages, their names, shards, and tied tables.

A tied table is a token table that the head uses too: the first and the last stage need it.

`build` returns a `Decoder`, the `Stages` of a pipeline rank, or DDP around a decoder. `unwrap`, `stages_of`,
`params_by_name` and `local_shard` take any of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kumi.nn.decoder import Decoder
from kumi.parallel.mesh import Mesh, new_group
from kumi.spec.layout import Layout
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.precision import Precision
from kumi.spec.schedule import is_pipelined, stage_assignment
from kumi.spec.schedules import FULL_BACKWARD
from kumi.spec.sharding import stage_bounds


def unwrap(model: nn.Module) -> nn.Module:
    """Return the decoder or the stages inside DDP; their parameters have the names of `kumi.spec.ledger`."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, which shares its memory: the tensor itself unless it is a DTensor.

    A DTensor is recognised by its methods: importing the class costs a single process half a second of CPU time.
    """
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


@lru_cache(maxsize=8)
def params_by_name(spec: ModelSpec) -> Mapping[str, Param]:
    """Return the parameters and buffers of the complete model by name."""
    return {tensor.name: tensor for tensor in tensors(spec)}


class Stages(nn.Module):
    """The pipeline stages of one rank. Their parameters have the names of the complete model.

    `ties`: the group of the first and the last stage if each of them has a copy of a tied token table; None elsewhere.
    """

    def __init__(
        self, spec: ModelSpec, stages: Mapping[int, Decoder], precision: Precision, ties: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        self.spec, self.ties = spec, ties
        self.reduce_dtype: torch.dtype = getattr(torch, precision.reduce)
        self.held = nn.ModuleDict({str(number): stage for number, stage in stages.items()})

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.held.values():
            yield from stage.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for stage in self.held.values():
            yield from stage.named_buffers(prefix, recurse, remove_duplicate)


def stages_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the stages in a model that `build` returned, by number; a complete decoder is stage 0."""
    if isinstance(model, Stages):
        return {int(number): stage for number, stage in model.held.items()}
    return {0: model}


def uses_stages(layout: Layout) -> bool:
    """Return True if a rank's model is made of stages, False if it is the complete decoder."""
    return layout.stages > 1 or is_pipelined(layout.pp, layout.schedule)


def splits_backward(layout: Layout) -> bool:
    """Return True if the schedule computes weight gradients as separate actions."""
    return layout.schedule not in FULL_BACKWARD


def local_stages(spec: ModelSpec, mesh: Mesh) -> dict[int, tuple[int, int]]:
    """Return the stages of this rank, each with its layers [first, last)."""
    layout = mesh.layout
    bounds = stage_bounds(layout, spec.num_hidden_layers)
    return {
        stage: bounds[stage] for stage in stage_assignment(layout.schedule, layout.pp, layout.stages)[mesh.index("pp")]
    }


def share_tied_table(stages: Mapping[int, Decoder]) -> None:
    """Let the last stage use the first stage's token table, if both are on this rank and the head is tied.

    Only the first stage registers the table, so that it is sharded and saved once.
    """
    first, last = min(stages), max(stages)
    if first == last or not (stages[first].has_embedding and stages[last].has_head):
        return
    if stages[last].spec.tie_word_embeddings:
        # `shared` tells data parallelism to keep the table unsharded for both stages.
        del stages[last].model.embed_tokens
        table = stages[first].model.embed_tokens
        table.shared = True  # type: ignore[assignment]
        object.__setattr__(stages[last].model, "embed_tokens", table)


def tie_group(spec: ModelSpec, mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the group of the first and the last stage's ranks.

    None if this rank has neither stage, if one rank has both, or if the head is not tied. Every rank must call it.
    """
    layout = mesh.layout
    assignment = stage_assignment(layout.schedule, layout.pp, layout.stages)
    end_ranks = [rank for rank, stages in enumerate(assignment) if {0, layout.pp * layout.stages - 1} & set(stages)]
    if not spec.tie_word_embeddings or len(end_ranks) < 2:
        return None
    coords, tied = layout.coords(mesh.rank), mesh.index("pp") in end_ranks
    # PyTorch names a group after the number of groups that the rank has made, and NCCL splits each group off the world
    # group. All ranks must therefore make the same number of groups: a rank without a tied table makes a group of
    # itself.
    ranks = [layout.rank({**coords, "pp": index}) for index in end_ranks] if tied else [mesh.rank]
    group = new_group(ranks, mesh.rank_info, layout)
    return group if tied else None
