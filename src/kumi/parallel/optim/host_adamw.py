"""AdamW on the host, with states in the host's memory or on its drives.

The gradients and parameters of one bucket at a time are copied to the host and updated there, and the parameters are
copied back (Ren et al., 2021, arXiv:2101.06840). Three buckets are in flight at once:

    d2h     bucket i + 1   gradients and parameters from the device, states from the drives
    update  bucket i       on the host's processors
    h2d     bucket i - 1   parameters to the device, states to the drives

With states on drives (as in Rajbhandari et al., 2021, arXiv:2104.07857), only the states of three buckets are in
memory. The results are identical to those of `AdamW` on the host, for any bucket size.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kumi.accelerator import is_gpu
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.adamw import adamw_update, init_adamw
from kumi.parallel.optim.nvme_store import NvmeStore, open_nvme_store
from kumi.parallel.optim.optimizer import Optimizer, TrainedParams, drop_grads
from kumi.parallel.stage_modules import local_shard
from kumi.spec.optim import Optim
from kumi.spec.optim_states import COUNTER, MOMENTS
from kumi.spec.techniques import HOST_BUCKET_ELEMENTS, STAGING_BUFFERS

# Buckets, and tensors in them, start at multiples of this many elements: a cache line, and the kernel's vector length.
ALIGNED = 64


@dataclass(frozen=True)
class ParamSpan:
    """Elements [start, stop) of this rank's shard of `parameter`, at `offset` in a bucket."""

    parameter: nn.Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class UpdateBucket:
    """Parameters that are updated together.

    `group`: the settings of the parameters.
    `first`: index of the bucket's first element among the elements of all buckets.
    `size`: number of elements, including the padding that aligns parameters.
    """

    group: dict[str, Any]
    first: int
    size: int
    spans: tuple[ParamSpan, ...]


@dataclass(frozen=True)
class StagingBuffer:
    """Host memory for a bucket; each tensor has the shape (elements,).

    `means`, `squares`: empty unless states are on drives.
    `free`: on CUDA, the event after which the buffer can be reused: its parameters have been copied to the device.
    """

    parameters: Tensor
    gradients: Tensor
    means: Tensor
    squares: Tensor
    free: torch.cuda.Event | None


@dataclass(frozen=True)
class HostAdamW:
    """AdamW over parameters on any device, with its states on the host.

    `state` has plain tensors of this rank's shards. With a `store`, these tensors are files mapped into memory, for
    saving and restoring. The update reads and writes the files directly.
    """

    optim: Optim
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]
    buckets: tuple[UpdateBucket, ...]
    staging_buffers: tuple[StagingBuffer, ...]
    store: NvmeStore | None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            steps = [self.state[parameter][COUNTER] for parameter in group["params"] if parameter.grad is not None]
            if steps:
                torch._foreach_add_(steps, 1)
        buckets = map(_with_gradients, self.buckets)
        _update_all(self, [bucket for bucket in buckets if bucket.spans])

    def zero_grad(self) -> None:
        """Free the gradients."""
        drop_grads(self.param_groups)


def build_adamw(trained: TrainedParams) -> Optimizer:
    """Return AdamW over `trained`, with its states on the device, the host or drives, by the layout's `offload`."""
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
    """Return `init_adamw`'s optimizer, or `HostAdamW` if the layout's `offload` moves only optimizer states to the
    host, or moves states to drives.

    `folder`: where states on drives are, in unnamed files that vanish with the process.
    `bucket`: elements of a bucket.

    Raise SaveError if the drives have no room.
    """
    on_device = mesh.layout.offload in ("none", "states", "activations")
    plain = init_adamw(named_parameters, decayed, optim, states=on_device)
    if on_device:
        return plain
    buckets = tuple(_split(plain.param_groups, bucket))
    trained = [parameter for group in plain.param_groups for parameter in group["params"]]
    dtypes = {local_shard(parameter).dtype for parameter in trained}
    assert len(dtypes) == 1, f"parameters have the dtypes {dtypes}, but a bucket has one"
    (dtype,) = dtypes
    store = None
    if mesh.layout.offload.endswith("-nvme"):
        assert folder is not None, "offloading to drives needs a folder"
        store = open_nvme_store(folder, mesh.rank, sum(each.size for each in buckets), dtype)
    largest = min(bucket, max((each.size for each in buckets), default=0))
    staging = tuple(_staging_buffer(largest, dtype, trained, store) for _ in range(min(STAGING_BUFFERS, len(buckets))))
    states = _zero_states(plain.param_groups, buckets, store)
    return HostAdamW(optim, plain.param_groups, states, buckets, staging, store)


def _split(groups: Sequence[dict[str, Any]], size: int) -> Iterator[UpdateBucket]:
    """Yield buckets of at most `size` elements; a large parameter is in several."""
    assert size % ALIGNED == 0, f"a bucket of {size} elements would split a tensor within a vector of the kernel"
    end = 0
    for group in groups:
        spans: list[ParamSpan] = []
        first = filled = end
        for parameter in group["params"]:
            start, count = 0, local_shard(parameter).numel()
            while start < count:
                stop = min(count, start + first + size - filled)
                spans.append(ParamSpan(parameter, start, stop, filled - first))
                filled, start = filled + -(-(stop - start) // ALIGNED) * ALIGNED, stop
                if filled - first >= size:
                    yield UpdateBucket(group, first, filled - first, tuple(spans))
                    spans, first = [], filled
        if spans:
            yield UpdateBucket(group, first, filled - first, tuple(spans))
        end = filled


def _zero_states(
    groups: Sequence[dict[str, Any]], buckets: Sequence[UpdateBucket], store: NvmeStore | None
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the states of every parameter, zero. In a store, elements have the order of the buckets."""
    offsets = {
        span.parameter: bucket.first + span.offset for bucket in buckets for span in bucket.spans if not span.start
    }
    states: dict[Tensor, dict[str, Tensor]] = {}
    for group in groups:
        for parameter in group["params"]:
            shard, offset = local_shard(parameter), offsets.get(parameter, 0)
            states[parameter] = {COUNTER: torch.zeros((), dtype=torch.float32)}
            for name in MOMENTS:
                if store is None:
                    moment = torch.zeros(shard.shape, dtype=shard.dtype)
                else:
                    moment = store.mapped[name][offset : offset + shard.numel()].view(shard.shape)
                states[parameter][name] = moment
    return states


def _staging_buffer(
    size: int, dtype: torch.dtype, trained: Sequence[nn.Parameter], store: NvmeStore | None
) -> StagingBuffer:
    """Return a buffer of `size` elements, pinned if any of the parameters `trained` is on a GPU."""
    cuda = any(is_gpu(parameter.device) for parameter in trained)

    def empty(elements: int) -> Tensor:
        return torch.empty(elements, dtype=dtype, pin_memory=cuda)

    state_size = 0 if store is None else size
    free = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
    return StagingBuffer(empty(size), empty(size), empty(state_size), empty(state_size), free)


def _with_gradients(bucket: UpdateBucket) -> UpdateBucket:
    """Return `bucket` without the parameters that have no gradient."""
    return replace(bucket, spans=tuple(span for span in bucket.spans if span.parameter.grad is not None))


@dataclass(frozen=True)
class _Pending:
    """A bucket that is being copied to a staging buffer.

    `copied`: on CUDA, the event at the end of the copy from the device.
    `read`: the end of the read from the drives; None without drives.
    """

    bucket: UpdateBucket
    staging: StagingBuffer
    copied: torch.cuda.Event | None
    read: Future[None] | None


def _update_all(optimizer: HostAdamW, buckets: Sequence[UpdateBucket]) -> None:
    """Update `buckets` in turn, while the next bucket is copied to the host and the previous one to the device.

    A bucket with index i uses the staging buffer i modulo their number.
    """
    device = next((span.parameter.device for bucket in buckets for span in bucket.spans), torch.device("cpu"))
    streams = _streams(device)
    written: dict[int, Future[None]] = {}
    with ThreadPoolExecutor(2, thread_name_prefix="kumi-drives") as pool:
        pending: _Pending | None = None
        for index in range(len(buckets) + 1):
            following = None
            if index < len(buckets):
                slot = index % len(optimizer.staging_buffers)
                if slot in written:
                    written.pop(slot).result()
                following = _fetch(optimizer, buckets[index], optimizer.staging_buffers[slot], streams, pool)
            if pending is not None:
                _compute(optimizer, pending)
                _begin_h2d(pending, streams)
                if optimizer.store is not None:
                    write = pool.submit(optimizer.store.write, pending.bucket.first, _staged_moments(pending))
                    written[(index - 1) % len(optimizer.staging_buffers)] = write
            pending = following
        for write in written.values():
            write.result()
    if streams is not None:
        torch.cuda.current_stream(device).wait_stream(streams[1])


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
    """Return the d2h and the h2d stream, which wait for the current stream of the device; None on a CPU."""
    if not is_gpu(device):
        return None
    d2h, h2d = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    for stream in (d2h, h2d):
        stream.wait_stream(torch.cuda.current_stream(device))
    return d2h, h2d


def _fetch(
    optimizer: HostAdamW,
    bucket: UpdateBucket,
    staging: StagingBuffer,
    streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None,
    pool: ThreadPoolExecutor,
) -> _Pending:
    """Begin to copy `bucket` to `staging`."""
    read = None
    if optimizer.store is not None:
        read = pool.submit(
            optimizer.store.read, bucket.first, (staging.means[: bucket.size], staging.squares[: bucket.size])
        )
    if streams is None:
        _copy_d2h(bucket, staging, wait=True)
        return _Pending(bucket, staging, None, read)
    assert staging.free is not None
    with torch.cuda.stream(streams[0]):
        streams[0].wait_event(staging.free)
        _copy_d2h(bucket, staging, wait=False)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(streams[0])
    return _Pending(bucket, staging, copied, read)


def _copy_d2h(bucket: UpdateBucket, staging: StagingBuffer, *, wait: bool) -> None:
    """Copy the parameters and gradients of `bucket` to `staging`."""
    for span in bucket.spans:
        shard, grad = local_shard(span.parameter), span.parameter.grad
        assert grad is not None
        elements = local_shard(grad).reshape(-1)[span.start : span.stop]
        _staged(staging.parameters, span).copy_(_elements(shard, span), non_blocking=not wait)
        _staged(staging.gradients, span).copy_(elements, non_blocking=not wait)


def _elements(shard: Tensor, span: ParamSpan) -> Tensor:
    """Return the elements of `span` in a shard."""
    return shard.view(-1)[span.start : span.stop]


def _staged(buffer: Tensor, span: ParamSpan) -> Tensor:
    """Return the elements of `span` in a staging buffer."""
    return buffer[span.offset : span.offset + span.stop - span.start]


def _compute(optimizer: HostAdamW, pending: _Pending) -> None:
    """Wait for a bucket, and update it."""
    if pending.copied is not None:
        pending.copied.synchronize()
    if pending.read is not None:
        pending.read.result()
    spans, staging, states = pending.bucket.spans, pending.staging, optimizer.state
    if optimizer.store is None:
        means, squares = ([_elements(states[span.parameter][name], span) for span in spans] for name in MOMENTS)
    else:
        means, squares = ([_staged(buffer, span) for span in spans] for buffer in (staging.means, staging.squares))
    adamw_update(
        pending.bucket.group,
        [_staged(staging.parameters, span) for span in spans],
        [_staged(staging.gradients, span) for span in spans],
        means,
        squares,
        [states[span.parameter][COUNTER] for span in spans],
    )


def _begin_h2d(pending: _Pending, streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None) -> None:
    """Begin to copy the parameters of a bucket back to the device."""
    if streams is None:
        _copy_h2d(pending, wait=True)
        return
    assert pending.staging.free is not None
    with torch.cuda.stream(streams[1]):
        _copy_h2d(pending, wait=False)
        pending.staging.free.record(streams[1])


def _copy_h2d(pending: _Pending, *, wait: bool) -> None:
    """Copy the updated parameters of `pending` from its staging buffer to their shards."""
    for span in pending.bucket.spans:
        staged = _staged(pending.staging.parameters, span)
        _elements(local_shard(span.parameter), span).copy_(staged, non_blocking=not wait)


def _staged_moments(pending: _Pending) -> tuple[Tensor, Tensor]:
    size = pending.bucket.size
    return pending.staging.means[:size], pending.staging.squares[:size]
