"""The layout of a run: the degree of each mesh axis, the coordinates of ranks, and the memory techniques."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, fields
from math import prod

from kumi.spec.schedules import DEFAULT

# From the outermost axis, whose neighbours are the most ranks apart, to the innermost, whose neighbours are adjacent.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
RECOMPUTE = ("none", "selective", "full")
CONTEXT = ("ring", "ulysses")
OFFLOAD = ("none", "optimizer", "states", "activations", "optimizer-nvme", "states-nvme")


@dataclass(frozen=True)
class Layout:
    """The complete parallel layout of a run.

    - `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`: degrees; their product is the number of ranks. `dp_replicate` > 1
      with `dp_shard` > 1 is hybrid sharding.
    - `ep`, `expert_tp`: experts are distributed over `ep` groups, and each expert is sharded over `expert_tp` ranks.
      The groups consist of the `dp_shard` x `cp` x `tp` ranks of a replica.
    - `zero`: states that the `dp_shard` x `cp` ranks shard (Rajbhandari et al., 2020, arXiv:1910.02054): 0 none,
      1 optimizer states, 2 also gradients, 3 also parameters.
    - `microbatch`: sequences of a microbatch.
    - `recompute`: activations that the backward pass recomputes: "none", "selective" (the cheap, large ones) or "full"
      (complete layers).
    - `recompute_layers`: layers of each rank that recompute; None for all.
    - `sequence_parallel`: activations between the tensor-parallel blocks are sharded over `tp` by tokens.
    - `schedule`: pipeline schedule (`kumi.spec.schedules`).
    - `stages`: pipeline stages of each rank.
    - `stage_layers`: layers of each stage, in model order; empty for an even division.
    - `offload`: tensors that move to the host, or its NVMe drives: optimizer states, all states, or saved activations.
    - `context`: how attention reads the other parts of a sequence: keys and values travel round a ring ("ring"; Liu et
      al., 2023, arXiv:2310.01889), or an all-to-all exchanges heads ("ulysses"; Jacobs et al., 2023, arXiv:2309.14509).
    - `tiles`: number of parts into which the intermediate dimension of dense feed-forward layers is split; the parts
      are computed one after the other.
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

    def one_of(self, name: str, values: Container[str]) -> bool:
        """Return whether the field `name`, which holds text, is one of `values`."""
        return getattr(self, name) in values

    @property
    def recomputes_all(self) -> bool:
        """True if recomputation, where it is on, applies to all layers."""
        return self.recompute_layers is None

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return prod(self.degrees)

    @property
    def words(self) -> str:
        """The fields with other values than the defaults, as in "dp_shard=2 zero=1"; "one rank" if there are none."""
        values = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return " ".join(f"{name}={value}" for name, value, default in values if value != default) or "one rank"

    @property
    def dp(self) -> int:
        """The number of data-parallel ranks, which read different sequences."""
        return self.dp_replicate * self.dp_shard

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` on every axis; the last axis varies fastest."""
        indices = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, indices[axis] = divmod(rank, degree)
        return {axis: indices[axis] for axis in AXES}

    def rank(self, coords: dict[str, int]) -> int:
        """Return the rank with the coordinates `coords`: the inverse of the method `coords`."""
        rank = 0
        for axis, degree in zip(AXES, self.degrees, strict=True):
            rank = rank * degree + coords[axis]
        return rank

    def dp_index(self, rank: int) -> int:
        """Return the index, in 0 .. dp - 1, of the slice of the global batch that `rank` reads."""
        coords = self.coords(rank)
        return coords["dp_replicate"] * self.dp_shard + coords["dp_shard"]
