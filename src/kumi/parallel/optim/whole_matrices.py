"""Whole matrices of sharded parameters, each on one of the ranks that hold its parts, and results back to all of them.

Every matrix has an owner among the n ranks that shard it. An all-to-all over each of the axes brings its parts to the
owner, which alone works on the whole matrix, and another brings every rank its part of the result. A rank sends
(n - 1) / n of its parts each way and works on 1 / n of the matrices; with an all-gather it would receive n - 1 parts
for each of its own, and work on all matrices.
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
from kumi.parallel.optim.shard_sums import all_axes_of
from kumi.spec.layout import Layout
from kumi.spec.op import Dim, Param
from kumi.spec.process_groups import axis, members_of
from kumi.spec.shard_slices import Slice, slices
from kumi.spec.sharding import is_routed, local_shape, shard_shape

# Elements of whole matrices that a rank owns of a bucket: long messages, and little memory beside the states.
OWNED = 2**25


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor: the shape, and where its rectangles lie in the whole of the rank's experts."""

    shape: tuple[int, ...]
    regions: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """A parameter in a bucket. `shape` is that of the whole and `owner` the owner's place on each of the bucket's axes.

    `parts` are those of all ranks of the axes, the first axis varying fastest. `sizes` are, for each axis, the elements
    that its ranks send once the axes before it have been exchanged over.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    owner: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Bucket:
    """Parameters sharded over the same `axes` whose matrices travel together. `index` is this rank's place on each
    axis, `part` the place of its parts among all."""

    axes: tuple[str, ...]
    index: tuple[int, ...]
    part: int
    entries: tuple[Entry, ...]

    def with_gradients(self) -> Bucket:
        """Return the bucket without the parameters that have no gradient, which they have on all ranks or on none."""
        return replace(self, entries=tuple(one for one in self.entries if one.parameter.grad is not None))


def buckets_of(parameters: Sequence[tuple[Param, nn.Parameter]], mesh: Mesh, owned: int = OWNED) -> tuple[Bucket, ...]:
    """Return `parameters` in buckets of about `owned` elements of whole matrices for each owner, in order."""
    alike: dict[tuple[str, ...], list[tuple[Param, nn.Parameter]]] = defaultdict(list)
    for param, parameter in parameters:
        alike[all_axes_of(param, mesh.layout)].append((param, parameter))
    return tuple(
        _bucket(run, axes, mesh)
        for axes, same in alike.items()
        for run in _runs(same, owned * prod(axis(mesh.layout, name).degree for name in axes))
    )


def _runs(parameters: Sequence[tuple[Param, nn.Parameter]], most: int) -> Iterator[list[tuple[Param, nn.Parameter]]]:
    """`parameters` in runs of at most `most` elements, or of one parameter."""
    run: list[tuple[Param, nn.Parameter]] = []
    for param, parameter in parameters:
        if run and sum(one.numel for one, _ in run) + param.numel > most:
            yield run
            run = []
        run.append((param, parameter))
    if run:
        yield run


def _bucket(parameters: Sequence[tuple[Param, nn.Parameter]], axes: tuple[str, ...], mesh: Mesh) -> Bucket:
    layout = mesh.layout
    degrees, index = [axis(layout, name).degree for name in axes], tuple(mesh.index(name) for name in axes)
    members = members_of(layout, axes[::-1], mesh.rank)
    owners = _owners([param for param, _ in parameters], prod(degrees))
    entries = []
    for (param, parameter), owner in zip(parameters, owners, strict=True):
        parts = tuple(_part(param.dims, layout, rank) for rank in members)
        shape = shard_shape(param, 1, layout.ep, 1)
        entries.append(Entry(parameter, shape, parts, _places(owner, degrees), _sizes(parts, degrees, index)))
    return Bucket(axes, index, members.index(mesh.rank), tuple(entries))


def _owners(params: Sequence[Param], ranks: int) -> list[int]:
    """The owner of each of `params`: the most work left goes to the rank with the least."""
    load, owners = [0] * ranks, [0] * len(params)
    work = [param.numel * min(param.shape[-2:]) for param in params]  # of a product with itself, up to a factor
    for place in sorted(range(len(params)), key=lambda place: (-work[place], place)):
        owners[place] = load.index(min(load))
        load[owners[place]] += work[place]
    return owners


def _places(member: int, degrees: Sequence[int]) -> tuple[int, ...]:
    """The place on each axis of rank number `member` of all axes, the first of which varies fastest."""
    places = []
    for degree in degrees:
        member, place = divmod(member, degree)
        places.append(place)
    return tuple(places)


def _sizes(parts: Sequence[Part], degrees: Sequence[int], index: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`Entry.sizes`: on an axis, a rank has the parts of all ranks of the axes before it."""
    numels, sizes = [part.numel for part in parts], []
    for level, degree in enumerate(degrees):
        below = prod(degrees[:level])
        above = sum(one * prod(degrees[:number]) for number, one in enumerate(index) if number > level)
        firsts = range(above, above + below * degree, below)
        sizes.append(tuple(sum(numels[first : first + below]) for first in firsts))
    return tuple(sizes)


@lru_cache(maxsize=65536)
def _part(dims: tuple[Dim, ...], layout: Layout, rank: int) -> Part:
    param = Param("", dims)
    rectangles = slices(param, layout, rank)
    if is_routed(param):
        first = axis(layout, "ep").index(rank) * shard_shape(param, 1, layout.ep, 1)[0]
        rectangles = tuple(replace(one, start=(one.start[0] - first, *one.start[1:])) for one in rectangles)
    return Part(local_shape(param, layout, rank), rectangles)


def bring(bucket: Bucket, parts: Sequence[Tensor], mesh: Mesh) -> dict[int, Tensor]:
    """Return the whole tensors that this rank owns, by their places in the bucket, from the `parts` of all ranks.

    All ranks of the bucket's axes must call it together; `parts` are of one dtype.
    """
    if not bucket.axes:
        return dict(enumerate(parts))
    flat = {place: part.reshape(-1) for place, part in enumerate(parts)}
    for level, name in enumerate(bucket.axes):
        owners = {place: bucket.entries[place].owner[level] for place in flat}
        ranks = range(axis(mesh.layout, name).degree)
        mine = [place for place in flat if owners[place] == bucket.index[level]]
        sent = [[flat[place] for place in flat if owners[place] == to] for to in ranks]
        sizes = [[bucket.entries[place].sizes[level][of] for place in mine] for of in ranks]
        came = _exchange(sent, sizes, parts[0], mesh.groups[name])
        flat = {place: torch.cat([pieces[number] for pieces in came]) for number, place in enumerate(mine)}
    return {place: _assembled(bucket.entries[place], values) for place, values in flat.items()}


def send_back(bucket: Bucket, wholes: Mapping[int, Tensor], like: Tensor, mesh: Mesh) -> list[Tensor]:
    """Return this rank's part of every tensor in the bucket, from the `wholes` of their owners: `bring` reversed.

    All ranks of the bucket's axes must call it together; `like` has the dtype and the device.
    """
    if not bucket.axes:
        return [wholes[place] for place in range(len(bucket.entries))]
    flat = {place: _disassembled(bucket.entries[place], whole) for place, whole in wholes.items()}
    for level, name in reversed(list(enumerate(bucket.axes))):
        entries, ranks = bucket.entries, range(axis(mesh.layout, name).degree)
        pieces = {place: torch.split(values, list(entries[place].sizes[level])) for place, values in flat.items()}
        sent = [[pieces[place][to] for place in sorted(flat)] for to in ranks]
        expected = [place for place, one in enumerate(entries) if one.owner[:level] == bucket.index[:level]]
        taken = [[place for place in expected if entries[place].owner[level] == of] for of in ranks]
        sizes = [[entries[place].sizes[level][bucket.index[level]] for place in places] for places in taken]
        came = _exchange(sent, sizes, like, mesh.groups[name])
        flat = {place: one for places, ones in zip(taken, came, strict=True) for place, one in zip(places, ones)}
    return [flat[place].view(entry.parts[bucket.part].shape) for place, entry in enumerate(bucket.entries)]


def _exchange(
    sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor, group: dist.ProcessGroup
) -> list[tuple[Tensor, ...]]:
    """Send the flat tensors `sent[rank]` to each rank; return those of `sizes[rank]` elements that each has sent."""
    outgoing = torch.cat([like.new_empty(0), *(tensor for tensors in sent for tensor in tensors)])
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    totals = [sum(some) for some in sizes]
    incoming = like.new_empty(sum(totals))
    dist.all_to_all_single(incoming, outgoing, totals, counts, group=group)
    return [torch.split(part, list(some)) if some else () for part, some in zip(torch.split(incoming, totals), sizes)]


def _assembled(entry: Entry, values: Tensor) -> Tensor:
    """The whole tensor whose parts lie one after the other in `values`."""
    whole = values.new_empty(entry.shape)
    for part, piece in zip(entry.parts, torch.split(values, [part.numel for part in entry.parts]), strict=True):
        for region in part.regions:
            whole[_slices(region.start, region)] = piece.view(part.shape)[_slices(region.local, region)]
    return whole


def _disassembled(entry: Entry, whole: Tensor) -> Tensor:
    """The parts of all ranks, one after the other."""
    values = whole.new_zeros(sum(part.numel for part in entry.parts))
    for part, piece in zip(entry.parts, torch.split(values, [part.numel for part in entry.parts]), strict=True):
        for region in part.regions:
            piece.view(part.shape)[_slices(region.local, region)] = whole[_slices(region.start, region)]
    return values


def _slices(start: Sequence[int], region: Slice) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, region.shape, strict=True))
