"""How the ranks of a run are arranged: the degree of every mesh axis, and who is where."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields
from math import prod

from kumi.spec.schedules import DEFAULT

# From the outermost axis, whose neighbours are far apart, to the innermost, whose neighbours share a node.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
RECOMPUTE = ("none", "selective", "full")
CONTEXT = ("ring", "ulysses")
OFFLOAD = ("none", "optimizer", "states", "activations", "optimizer-nvme", "states-nvme")


@dataclass(frozen=True)
class Layout:
    """The full parallel arrangement of a run.

    `zero` says what the `dp_shard` ranks divide among them (Rajbhandari et al., 2020, arXiv:1910.02054): 0 nothing,
    1 optimizer states, 2 gradients too, 3 parameters too. `dp_replicate` > 1 beside `dp_shard` > 1 is hybrid sharding.
    `ep` borrows its ranks from `dp_shard`, `cp` and `tp`, and `expert_tp` cuts each expert. `microbatch` is in
    sequences; `recompute` is what the backward pass computes again: "none", "selective" (the cheap, large activations)
    or "full" (whole layers), in `recompute_layers` layers of each rank (None: in all). `sequence_parallel` divides
    over `tp` what lies between the tensor-parallel regions.

    `schedule` orders the microbatches over the pipeline, `stages` of which each pp rank holds; `stage_layers` says how
    many layers each stage has, in model order, and is empty where they are as even as can be. `offload` moves to the
    host, or on to its NVMe drives, the optimizer states, all states, or the kept activations. `context` says how
    attention looks beyond a cp rank's part of the sequence: keys and values go round ("ring"; Liu et al., 2023,
    arXiv:2310.01889), or heads are dealt out ("ulysses"; Jacobs et al., 2023, arXiv:2309.14509). Dense feed-forward
    layers are computed in so many `tiles` of their columns, one after the other.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    microbatch: int = 1
    recompute: str = "none"
    recompute_layers: int | None = None
    sequence_parallel: bool = True
    expert_tp: int = 1
    schedule: str = DEFAULT
    stages: int = 1
    stage_layers: tuple[int, ...] = ()
    offload: str = "none"
    context: str = "ring"
    tiles: int = 1

    def one_of(self, name: str, words: Container[str]) -> bool:
        """Return whether the field `name`, which holds text, is one of `words`."""
        return getattr(self, name) in words

    @property
    def recomputes_all(self) -> bool:
        """Whether all layers recompute, where any do."""
        return self.recompute_layers is None

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return prod(self.degrees)

    @property
    def words(self) -> str:
        """The fields that are not at their defaults, as in "dp_shard=2 zero=1 microbatch=4"."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value, default in values if value != default) or "one rank"

    @property
    def dp(self) -> int:
        """How many ranks see different sequences."""
        return self.dp_replicate * self.dp_shard

    def coords(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on every axis; the last axis varies fastest."""
        found = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, found[axis] = divmod(rank, degree)
        return {axis: found[axis] for axis in AXES}

    def rank(self, coords: dict[str, int]) -> int:
        """The rank at `coords`, the inverse of `coords`."""
        number = 0
        for axis, degree in zip(AXES, self.degrees, strict=True):
            number = number * degree + coords[axis]
        return number

    def dp_index(self, rank: int) -> int:
        """Which slice of the global batch `rank` reads, in 0 .. dp-1."""
        coords = self.coords(rank)
        return coords["dp_replicate"] * self.dp_shard + coords["dp_shard"]
