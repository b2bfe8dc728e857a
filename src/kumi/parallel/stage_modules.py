"""The stages of a pipeline that one rank holds, as one module, and what they share with other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.nn.decoder import Decoder
from kumi.parallel.mesh import Mesh, new_group
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision
from kumi.spec.schedule import stage_assignment
from kumi.spec.schedules import DEFAULT, FULL_BACKWARD
from kumi.spec.sharding import stage_bounds


class Stages(nn.Module):
    """The stages of this rank, whose parameters go by their names in the whole model.

    `ties`: the ranks with the first and the last stage, where each has a copy of a token table that is also the head;
    None elsewhere.
    """

    def __init__(
        self, spec: ModelSpec, held: Mapping[int, Decoder], precision: Precision, ties: dist.ProcessGroup | None
    ) -> None:
        super().__init__()
        self.spec, self.ties = spec, ties
        self.reduce_dtype: torch.dtype = getattr(torch, precision.reduce)
        self.held = nn.ModuleDict({str(stage): part for stage, part in held.items()})

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.held.values():
            yield from part.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        for part in self.held.values():
            yield from part.named_buffers(prefix, recurse, remove_duplicate)


def in_stages(layout: Layout) -> bool:
    """Whether a rank's model is made of stages; else it is the whole decoder, one microbatch after the other."""
    return layout.pp * layout.stages > 1 or layout.schedule != DEFAULT


def splits_backward(layout: Layout) -> bool:
    """Whether the schedule has weight gradients of its own."""
    return layout.schedule not in FULL_BACKWARD


def held_stages(spec: ModelSpec, mesh: Mesh) -> dict[int, tuple[int, int]]:
    """The stages that this rank holds, and the layers [first, last) of each."""
    layout = mesh.layout
    bounds = stage_bounds(layout, spec.num_hidden_layers)
    return {
        stage: bounds[stage] for stage in stage_assignment(layout.schedule, layout.pp, layout.stages)[mesh.index("pp")]
    }


def stages_of(model: nn.Module) -> dict[int, nn.Module]:
    """The stages in what `build` returned, by their numbers; a whole decoder is stage 0."""
    if isinstance(model, Stages):
        return {int(stage): part for stage, part in model.held.items()}
    return {0: model}


def share_table(held: Mapping[int, Decoder]) -> None:
    """Lets the last stage read the first stage's token table, where both are here and the head is that table.

    The table stays the first stage's: it is registered there only, so that it is found, divided and saved once.
    """
    first, last = min(held), max(held)
    if first == last or not (held[first].has_embedding and held[last].has_head):
        return
    if held[last].spec.tie_word_embeddings:
        # `shared` tells data parallelism to keep it gathered for both.
        del held[last].model.embed_tokens
        table = held[first].model.embed_tokens
        table.shared = True  # type: ignore[assignment]
        object.__setattr__(held[last].model, "embed_tokens", table)


def tie_group(spec: ModelSpec, mesh: Mesh) -> dist.ProcessGroup | None:
    """The ranks of the first and the last stage, if this rank has one of them, they are two, and the head is the token
    table. Every rank must call it."""
    layout = mesh.layout
    held = stage_assignment(layout.schedule, layout.pp, layout.stages)
    ends = [rank for rank, stages in enumerate(held) if {0, layout.pp * layout.stages - 1} & set(stages)]
    if not spec.tie_word_embeddings or len(ends) < 2:
        return None
    coords, tied = layout.coords(mesh.rank), mesh.index("pp") in ends
    # PyTorch names a group after how many the rank has made, and NCCL splits it off the group of all, so that all must
    # make equally many: the others one of their own.
    ranks = [layout.rank({**coords, "pp": index}) for index in ends] if tied else [mesh.rank]
    group = new_group(ranks, mesh.place)
    return group if tied else None
