"""AdamW whose states are on the host, or on its drives, and which the host computes.

Of a bucket of parameters at a time, gradients and parameters come to the host, are updated there, and the parameters go
back (Ren et al., 2021, arXiv:2101.06840). What comes, what is computed and what goes are of three buckets at once:

    down    bucket i + 1   gradients and parameters from the device, states from the drives
    update  bucket i       on the host's processors
    up      bucket i - 1   parameters to the device, states to the drives

Where states are on drives (Rajbhandari et al., 2021, arXiv:2104.07857, in kind) memory holds those of three buckets.
The arithmetic is that of `AdamW` on the host, element by element, however it is cut.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kumi.parallel.grad_norm import local
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.adamw import init_adamw, update
from kumi.parallel.optim.nvme_store import Drives, open_drives
from kumi.parallel.optim.optimizer import Optimizer, Trained, drop_gradients
from kumi.spec.optim import Optim
from kumi.spec.optim_states import COUNTER, MOMENTS
from kumi.spec.techniques import HOST_BUCKET_ELEMENTS, STAGING_BUFFERS

# Buckets begin, and tensors in them, at multiples of so many elements: a cache line, and what a kernel takes at once.
ALIGNED = 64


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of what this rank holds of `parameter`, which lie in a bucket from `place` on."""

    parameter: nn.Parameter
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class Bucket:
    """Parameters with the settings `group` that are updated together, from element `first` of all, `size` of them."""

    group: dict[str, Any]
    first: int
    size: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Room:
    """Memory of the host for a bucket, (elements,) each; `means` and `squares` are empty where states stay in memory.
    `free` is there, on CUDA, once what went up from here has arrived."""

    parameters: Tensor
    gradients: Tensor
    means: Tensor
    squares: Tensor
    free: torch.cuda.Event | None


@dataclass(frozen=True)
class HostAdamW:
    """AdamW over parameters on any device, with its states on the host: `state` has plain tensors of this rank's parts.

    With `drives` these are files, mapped into memory for who saves or restores them; the update does not touch them
    there, and reads and writes the files.
    """

    optim: Optim
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]
    buckets: tuple[Bucket, ...]
    rooms: tuple[Room, ...]
    drives: Drives | None

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            steps = [self.state[one][COUNTER] for one in group["params"] if one.grad is not None]
            if steps:
                torch._foreach_add_(steps, 1)
        _update_all(self, [found for bucket in self.buckets if (found := _with_gradients(bucket)).spans])

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""
        drop_gradients(self.param_groups)


def build_adamw(trained: Trained) -> Optimizer:
    """Return AdamW over `trained`, with the states where the layout's `offload` says."""
    named = [(param.name, parameter) for param, parameter in trained.parameters]
    decayed = {param.name for param, _ in trained.parameters if param.decayed}
    return init_placed_adamw(named, decayed, trained.optim, trained.mesh, trained.folder)


def init_placed_adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    decayed: Container[str],
    optim: Optim,
    mesh: Mesh,
    folder: Path | None = None,
    *,
    bucket: int = HOST_BUCKET_ELEMENTS,
) -> Optimizer:
    """As `init_adamw`, with the states where the layout's `offload` says.

    `folder` is where states on drives go, in files that have no name and vanish with the process. A bucket has `bucket`
    elements. Raises SaveError where the drives have no room.
    """
    on_device = mesh.layout.offload in ("none", "states", "activations")
    plain = init_adamw(named_parameters, decayed, optim, states=on_device)
    if on_device:
        return plain
    buckets = tuple(_cut(plain.param_groups, bucket))
    trained = [parameter for group in plain.param_groups for parameter in group["params"]]
    sizes = {local(parameter).dtype for parameter in trained}
    assert len(sizes) == 1, f"parameters have the dtypes {sizes}, and a bucket has one"
    (dtype,) = sizes
    drives = None
    if mesh.layout.offload.endswith("-nvme"):
        assert folder is not None, "whoever offloads to drives names a folder on them"
        drives = open_drives(folder, mesh.rank, sum(one.size for one in buckets), dtype)
    most = min(bucket, max((one.size for one in buckets), default=0))
    rooms = tuple(_room(most, dtype, trained, drives) for _ in range(min(STAGING_BUFFERS, len(buckets))))
    states = _states(plain.param_groups, buckets, drives)
    return HostAdamW(optim, plain.param_groups, states, buckets, rooms, drives)


def _cut(groups: Sequence[dict[str, Any]], size: int) -> Iterator[Bucket]:
    """Buckets of at most `size` elements; a large parameter is in several."""
    assert size % ALIGNED == 0, f"a bucket of {size} elements would cut a tensor where a kernel does not"
    end = 0
    for group in groups:
        spans: list[Span] = []
        first = filled = end
        for parameter in group["params"]:
            start, count = 0, local(parameter).numel()
            while start < count:
                stop = min(count, start + first + size - filled)
                spans.append(Span(parameter, start, stop, filled - first))
                filled, start = filled + -(-(stop - start) // ALIGNED) * ALIGNED, stop
                if filled - first >= size:
                    yield Bucket(group, first, filled - first, tuple(spans))
                    spans, first = [], filled
        if spans:
            yield Bucket(group, first, filled - first, tuple(spans))
        end = filled


def _states(
    groups: Sequence[dict[str, Any]], buckets: Sequence[Bucket], drives: Drives | None
) -> dict[Tensor, dict[str, Tensor]]:
    """The states of every parameter, zero; their elements lie in files as they do in buckets."""
    places = {
        span.parameter: bucket.first + span.place for bucket in buckets for span in bucket.spans if not span.start
    }
    found: dict[Tensor, dict[str, Tensor]] = {}
    for group in groups:
        for parameter in group["params"]:
            part, place = local(parameter), places.get(parameter, 0)
            found[parameter] = {COUNTER: torch.zeros((), dtype=torch.float32)}
            for name in MOMENTS:
                if drives is None:
                    made = torch.zeros(part.shape, dtype=part.dtype)
                else:
                    made = drives.mapped[name][place : place + part.numel()].view(part.shape)
                found[parameter][name] = made
    return found


def _room(size: int, dtype: torch.dtype, trained: Sequence[nn.Parameter], drives: Drives | None) -> Room:
    cuda = any(parameter.is_cuda for parameter in trained)

    def make(elements: int) -> Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=cuda)

    states = 0 if drives is None else size
    free = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
    return Room(make(size), make(size), make(states), make(states), free)


def _with_gradients(bucket: Bucket) -> Bucket:
    """`bucket` without the parameters that have no gradient."""
    return replace(bucket, spans=tuple(span for span in bucket.spans if span.parameter.grad is not None))


@dataclass(frozen=True)
class _Coming:
    """A bucket on its way to a room: `copied` from the device, `read` from the drives."""

    bucket: Bucket
    room: Room
    copied: torch.cuda.Event | None
    read: Future[None] | None


def _update_all(optimizer: HostAdamW, buckets: Sequence[Bucket]) -> None:
    """Updates `buckets` one after the other, with the next on its way and the one before on its way back."""
    device = next((span.parameter.device for bucket in buckets for span in bucket.spans), torch.device("cpu"))
    streams = _streams(device)
    written: dict[int, Future[None]] = {}
    with ThreadPoolExecutor(2, thread_name_prefix="kumi-drives") as pool:
        coming: _Coming | None = None
        for number in range(len(buckets) + 1):
            following = None
            if number < len(buckets):
                index = number % len(optimizer.rooms)
                if index in written:
                    written.pop(index).result()
                following = _fetch(optimizer, buckets[number], optimizer.rooms[index], streams, pool)
            if coming is not None:
                _compute(optimizer, coming)
                _give_back(coming, streams)
                if optimizer.drives is not None:
                    write = pool.submit(optimizer.drives.write, coming.bucket.first, _read_parts(coming))
                    written[(number - 1) % len(optimizer.rooms)] = write
            coming = following
        for write in written.values():
            write.result()
    if streams is not None:
        torch.cuda.current_stream(device).wait_stream(streams[1])


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
    """Streams for what goes down and up, which wait for what the device has been given to do; None on a CPU."""
    if device.type != "cuda":
        return None
    down, up = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    for stream in (down, up):
        stream.wait_stream(torch.cuda.current_stream(device))
    return down, up


def _fetch(
    optimizer: HostAdamW,
    bucket: Bucket,
    room: Room,
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None,
    pool: ThreadPoolExecutor,
) -> _Coming:
    """Begins to bring `bucket` to `room`."""
    read = None
    if optimizer.drives is not None:
        read = pool.submit(
            optimizer.drives.read, bucket.first, (room.means[: bucket.size], room.squares[: bucket.size])
        )
    if streams is None:
        _copy_down(bucket, room, wait=True)
        return _Coming(bucket, room, None, read)
    assert room.free is not None
    with torch.cuda.stream(streams[0]):
        streams[0].wait_event(room.free)
        _copy_down(bucket, room, wait=False)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(streams[0])
    return _Coming(bucket, room, copied, read)


def _copy_down(bucket: Bucket, room: Room, *, wait: bool) -> None:
    for span in bucket.spans:
        part, grad = local(span.parameter), span.parameter.grad
        assert grad is not None
        _of(room.parameters, span).copy_(_elements(part, span), non_blocking=not wait)
        _of(room.gradients, span).copy_(local(grad).reshape(-1)[span.start : span.stop], non_blocking=not wait)


def _elements(part: Tensor, span: Span) -> Tensor:
    return part.view(-1)[span.start : span.stop]


def _of(room: Tensor, span: Span) -> Tensor:
    return room[span.place : span.place + span.stop - span.start]


def _compute(optimizer: HostAdamW, coming: _Coming) -> None:
    """The update of a bucket, once it is there."""
    if coming.copied is not None:
        coming.copied.synchronize()
    if coming.read is not None:
        coming.read.result()
    spans, room, states = coming.bucket.spans, coming.room, optimizer.state
    if optimizer.drives is None:
        means, squares = ([_elements(states[one.parameter][name], one) for one in spans] for name in MOMENTS)
    else:
        means, squares = ([_of(buffer, one) for one in spans] for buffer in (room.means, room.squares))
    update(
        coming.bucket.group,
        [_of(room.parameters, one) for one in spans],
        [_of(room.gradients, one) for one in spans],
        means,
        squares,
        [states[one.parameter][COUNTER] for one in spans],
    )


def _give_back(coming: _Coming, streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None) -> None:
    """Begins to bring the parameters of a bucket back to the device."""
    if streams is None:
        _copy_up(coming, wait=True)
        return
    assert coming.room.free is not None
    with torch.cuda.stream(streams[1]):
        _copy_up(coming, wait=False)
        coming.room.free.record(streams[1])


def _copy_up(coming: _Coming, *, wait: bool) -> None:
    for span in coming.bucket.spans:
        _elements(local(span.parameter), span).copy_(_of(coming.room.parameters, span), non_blocking=not wait)


def _read_parts(coming: _Coming) -> tuple[Tensor, Tensor]:
    size = coming.bucket.size
    return coming.room.means[:size], coming.room.squares[:size]
