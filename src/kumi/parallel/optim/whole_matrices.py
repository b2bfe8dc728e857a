"""Unsharded matrices of sharded parameters, each on one owner rank.

Every matrix has an owner among the n ranks that shard it. An all-to-all over each axis that shards it sends its
shards to the owner, which alone computes with the unsharded matrix, and another all-to-all sends every rank its shard
of the result. A rank sends (n - 1) / n of its shards each way, and computes with 1 / n of the matrices. With an
all-gather, it would receive n - 1 shards for each of its own, and compute with all matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.shard_sums import axes_of_param
from kumi.spec.layout import Layout
from kumi.spec.op import Dim, Param
from kumi.spec.process_groups import axis, members_of
from kumi.spec.shard_slices import Slice, slices
from kumi.spec.sharding import is_routed, local_shape, shard_shape

# Elements that a rank owns of a bucket: enough for long messages, little memory compared to the states.
_OWNED = 2**25


@dataclass(frozen=True)
class TensorShard:
    """One rank's shard of a tensor: its shape, and its slices of the unsharded tensor of the rank's experts."""

    shape: tuple[int, ...]
    regions: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class MatrixEntry:
    """A parameter in a bucket.

    `shape`: unsharded, with the experts of this rank only.
    `shards`: of all ranks of the axes; the first axis varies fastest.
    `owner`: index of the owner on each of the bucket's axes.
    `sizes`: for each axis, the elements that each of its ranks sends after the exchanges over the previous axes.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    shards: tuple[TensorShard, ...]
    owner: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MatrixBucket:
    """Parameters sharded over the same `axes`, whose matrices are exchanged together.

    `index`: this rank's index on each axis.
    `member`: index of this rank's shards in `MatrixEntry.shards`.
    """

    axes: tuple[str, ...]
    index: tuple[int, ...]
    member: int
    entries: tuple[MatrixEntry, ...]

    def with_gradients(self) -> MatrixBucket:
        """Return the bucket without the parameters that have no gradient. All ranks must agree on which have one."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.parameter.grad is not None))


def matrix_buckets(
    parameters: Sequence[tuple[Param, nn.Parameter]], mesh: Mesh, owned: int = _OWNED
) -> tuple[MatrixBucket, ...]:
    """Return `parameters` in buckets of about `owned` elements for each owner, in order."""
    by_axes: dict[tuple[str, ...], list[tuple[Param, nn.Parameter]]] = defaultdict(list)
    for param, parameter in parameters:
        by_axes[axes_of_param(param, mesh.layout)].append((param, parameter))
    return tuple(
        _bucket(run, axes, mesh)
        for axes, group in by_axes.items()
        for run in _runs(group, owned * prod(axis(mesh.layout, name).degree for name in axes))
    )


def _runs(parameters: Sequence[tuple[Param, nn.Parameter]], most: int) -> Iterator[list[tuple[Param, nn.Parameter]]]:
    """Yield `parameters` in runs of at most `most` elements, or of a single parameter."""
    run: list[tuple[Param, nn.Parameter]] = []
    for param, parameter in parameters:
        if run and sum(other.numel for other, _ in run) + param.numel > most:
            yield run
            run = []
        run.append((param, parameter))
    if run:
        yield run


def _bucket(parameters: Sequence[tuple[Param, nn.Parameter]], axes: tuple[str, ...], mesh: Mesh) -> MatrixBucket:
    """Return `parameters`, which are all sharded over `axes`, as a bucket, with an owner for each."""
    layout = mesh.layout
    degrees, index = [axis(layout, name).degree for name in axes], tuple(mesh.index(name) for name in axes)
    members = members_of(layout, axes[::-1], mesh.rank)
    owners = _owners([param for param, _ in parameters], prod(degrees))
    entries = []
    for (param, parameter), owner in zip(parameters, owners, strict=True):
        shards = tuple(_shard(param.dims, layout, rank) for rank in members)
        shape = shard_shape(param, 1, layout.ep, 1)
        entries.append(MatrixEntry(parameter, shape, shards, _indices(owner, degrees), _sizes(shards, degrees, index)))
    return MatrixBucket(axes, index, members.index(mesh.rank), tuple(entries))


def _owners(params: Sequence[Param], ranks: int) -> list[int]:
    """Return the owner of each of `params`: the largest remaining matrix goes to the rank with the least work."""
    load, owners = [0] * ranks, [0] * len(params)
    work = [param.numel * min(param.shape[-2:]) for param in params]  # FLOPs of X X^T, up to a factor
    for place in sorted(range(len(params)), key=lambda place: (-work[place], place)):
        owners[place] = load.index(min(load))
        load[owners[place]] += work[place]
    return owners


def _indices(member: int, degrees: Sequence[int]) -> tuple[int, ...]:
    """Return the index on each axis of the rank that is number `member` among the axes' ranks; the first axis varies
    fastest."""
    indices = []
    for degree in degrees:
        member, index = divmod(member, degree)
        indices.append(index)
    return tuple(indices)


def _sizes(shards: Sequence[TensorShard], degrees: Sequence[int], index: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return `MatrixEntry.sizes`. On an axis, a rank has the shards of all ranks of the previous axes."""
    numels, sizes = [shard.numel for shard in shards], []
    for level, degree in enumerate(degrees):
        below = prod(degrees[:level])
        above = sum(place * prod(degrees[:higher]) for higher, place in enumerate(index) if higher > level)
        firsts = range(above, above + below * degree, below)
        sizes.append(tuple(sum(numels[first : first + below]) for first in firsts))
    return tuple(sizes)


@lru_cache(maxsize=65536)
def _shard(dims: tuple[Dim, ...], layout: Layout, rank: int) -> TensorShard:
    """Return the shard that `rank` has of a parameter with these `dims`."""
    param = Param("", dims)
    covered = slices(param, layout, rank)
    if is_routed(param):
        first = axis(layout, "ep").index(rank) * shard_shape(param, 1, layout.ep, 1)[0]
        covered = tuple(replace(item, start=(item.start[0] - first, *item.start[1:])) for item in covered)
    return TensorShard(local_shape(param, layout, rank), covered)


def gather_to_owners(bucket: MatrixBucket, shards: Sequence[Tensor], mesh: Mesh) -> dict[int, Tensor]:
    """Return the unsharded tensors that this rank owns, by index in the bucket, from the `shards` of all ranks.

    All ranks of the bucket's axes must call it together; `shards` are of one dtype.
    """
    if not bucket.axes:
        return dict(enumerate(shards))
    flat = {place: shard.reshape(-1) for place, shard in enumerate(shards)}
    for level, name in enumerate(bucket.axes):
        owners = {place: bucket.entries[place].owner[level] for place in flat}
        ranks = range(axis(mesh.layout, name).degree)
        owned_places = [place for place in flat if owners[place] == bucket.index[level]]
        sent = [[flat[place] for place in flat if owners[place] == to] for to in ranks]
        sizes = [[bucket.entries[place].sizes[level][of] for place in owned_places] for of in ranks]
        received = _exchange(sent, sizes, shards[0], mesh.groups[name])
        flat = {place: torch.cat([pieces[index] for pieces in received]) for index, place in enumerate(owned_places)}
    return {place: _assemble(bucket.entries[place], values) for place, values in flat.items()}


def scatter_from_owners(bucket: MatrixBucket, owned: Mapping[int, Tensor], like: Tensor, mesh: Mesh) -> list[Tensor]:
    """Return this rank's shard of every tensor in the bucket, from the tensors `owned` by each rank.

    The inverse of `gather_to_owners`.

    All ranks of the bucket's axes must call it together. `like`: a tensor with the dtype and the device of the shards.
    """
    if not bucket.axes:
        return [owned[place] for place in range(len(bucket.entries))]
    flat = {place: _disassemble(bucket.entries[place], tensor) for place, tensor in owned.items()}
    for level, name in reversed(list(enumerate(bucket.axes))):
        entries, ranks = bucket.entries, range(axis(mesh.layout, name).degree)
        pieces = {place: torch.split(values, list(entries[place].sizes[level])) for place, values in flat.items()}
        sent = [[pieces[place][to] for place in sorted(flat)] for to in ranks]
        expected = [place for place, entry in enumerate(entries) if entry.owner[:level] == bucket.index[:level]]
        by_rank = [[place for place in expected if entries[place].owner[level] == of] for of in ranks]
        sizes = [[entries[place].sizes[level][bucket.index[level]] for place in places] for places in by_rank]
        received = _exchange(sent, sizes, like, mesh.groups[name])
        pairs = [pair for places, values in zip(by_rank, received, strict=True) for pair in zip(places, values)]
        flat = dict(pairs)
    return [flat[place].view(entry.shards[bucket.member].shape) for place, entry in enumerate(bucket.entries)]


def _exchange(
    sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor, group: dist.ProcessGroup
) -> list[tuple[Tensor, ...]]:
    """Send the flat tensors sent[rank] to each rank, and return the tensors of sizes[rank] elements from each rank."""
    outgoing = torch.cat([like.new_empty(0), *(tensor for tensors in sent for tensor in tensors)])
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    totals = [sum(of_rank) for of_rank in sizes]
    incoming = like.new_empty(sum(totals))
    dist.all_to_all_single(incoming, outgoing, totals, counts, group=group)
    return [
        torch.split(part, list(of_rank)) if of_rank else ()
        for part, of_rank in zip(torch.split(incoming, totals), sizes)
    ]


def _assemble(entry: MatrixEntry, values: Tensor) -> Tensor:
    """Return the unsharded tensor of the concatenated shards `values`."""
    tensor = values.new_empty(entry.shape)
    for shard, piece in zip(entry.shards, torch.split(values, [shard.numel for shard in entry.shards]), strict=True):
        for region in shard.regions:
            tensor[_slices(region.start, region)] = piece.view(shard.shape)[_slices(region.local, region)]
    return tensor


def _disassemble(entry: MatrixEntry, tensor: Tensor) -> Tensor:
    """Return the concatenated shards of all ranks."""
    values = tensor.new_zeros(sum(shard.numel for shard in entry.shards))
    for shard, piece in zip(entry.shards, torch.split(values, [shard.numel for shard in entry.shards]), strict=True):
        for region in shard.regions:
            piece.view(shard.shape)[_slices(region.local, region)] = tensor[_slices(region.start, region)]
    return values


def _slices(start: Sequence[int], region: Slice) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, region.shape, strict=True))
