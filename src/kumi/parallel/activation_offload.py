"""Offloading of activations: tensors that layers save are on the host between the forward and the backward pass.

A layer's tensors are copied to the host when the layer saves them, while it computes. They are copied back when the
backward pass reaches the following layer. The device then has the tensors of two layers: the current one and the next
one of the backward pass. Parameters, casts of parameters and the rotary tables, which all layers share, stay on the
device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from kumi.accelerator import is_gpu
from kumi.nn.attention.attention_context import AttentionContext
from kumi.nn.wrappers import Wrapper

# Smaller tensors stay on the device: a copy would cost more than the memory is worth.
_MIN_BYTES = 4096


class OffloadStream:
    """Copies between a device and the host, on two CUDA streams. On a CPU, nothing is copied.

    `bytes_moved`: bytes copied to the host so far.
    `layer_events`: the starts of the last two layers on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes_moved = device, 0
        cuda = is_gpu(device)
        self.d2h_stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.h2d_stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.layer_events: list[Any] = []

    def throttle(self, d2h_event: Any) -> None:
        """Wait until the device has begun the layer two before the current one, and until `d2h_event` has completed.

        `d2h_event`: None to wait for no copy. A host that ran further ahead of the device would allocate new memory,
        because the memory of earlier layers is not free yet.
        """
        if self.h2d_stream is None:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self.layer_events.append(event)
        if len(self.layer_events) > 2:
            self.layer_events.pop(0).synchronize()
        if d2h_event is not None:
            d2h_event.synchronize()

    def d2h(self, flat: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy `flat` to the host; return the copy and the event of its completion."""
        self.bytes_moved += flat.nbytes
        if self.d2h_stream is None:
            return flat, None
        self.d2h_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.d2h_stream):
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            flat.record_stream(self.d2h_stream)  # its memory is not reused before the copy has read it
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.d2h_stream)
        return host, event

    def h2d(self, host: Tensor, d2h_event: Any) -> tuple[Tensor, Any]:
        """Begin to copy `host` to the device after `d2h_event`; return the copy and the event of its completion."""
        if self.h2d_stream is None:
            return host, None
        with torch.cuda.stream(self.h2d_stream):
            self.h2d_stream.wait_event(d2h_event)
            flat = torch.empty(host.shape, dtype=host.dtype, device=self.device)
            flat.copy_(host, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.h2d_stream)
        return flat, event


class OffloadedTensor:
    """A storage of a saved tensor, on the host. Autograd graphs keep it alive as long as they need it."""

    def __init__(self, flat: Tensor, scope: LayerScope) -> None:
        self.scope = scope
        self.host, self.d2h_event = scope.stream.d2h(flat)
        self.on_device: tuple[Tensor, Any] | None = None

    def fetch(self) -> tuple[Tensor, Any]:
        """Return the storage on the device and the event of its arrival; the first call begins the copy."""
        if self.on_device is None:
            self.on_device = self.scope.stream.h2d(self.host, self.d2h_event)
        return self.on_device


class LayerScope:
    """One forward pass of a layer, with the tensors that it saves.

    `previous`: the scope of the previous layer; None for the first layer.
    `staying`: data pointers of storages that stay on the device.
    `d2h_event`: the completion of the last copy to the host.
    """

    def __init__(self, stream: OffloadStream, previous: LayerScope | None, staying: set[int]) -> None:
        self.stream, self.previous, self.staying = stream, previous, staying
        self.d2h_event: Any = None
        self.in_backward = False
        # The offloaded storages by (data pointer, version). Holding them while the layer runs keeps other tensors from
        # getting the same memory and being mistaken for them.
        self.saved: dict[tuple[int, int], tuple[Tensor, OffloadedTensor]] = {}
        self.offloaded: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> Any:
        """Return `tensor`, possibly detached, if it stays on the device. Else begin to copy its storage to the host,
        and return the storage with the tensor's dtype, shape, stride and offset."""
        storage = tensor.untyped_storage()
        stays = storage.data_ptr() in self.staying or _is_weight(tensor)
        if stays or storage.nbytes() < _MIN_BYTES or tensor.device.type != self.stream.device.type:
            return tensor.detach() if tensor.grad_fn is not None and not stays else tensor
        key = storage.data_ptr(), tensor._version
        if key not in self.saved:
            elements = storage.nbytes() // tensor.itemsize
            flat = tensor.detach().as_strided((elements,), (1,), 0)
            offloaded = OffloadedTensor(flat, self)
            self.saved[key] = flat, offloaded
            self.offloaded.add(offloaded)
            self.d2h_event = offloaded.d2h_event
        return self.saved[key][1], tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor of `packed`, a result of `pack`, on the device. The first call of a layer also begins to
        copy the previous layer's tensors to the device."""
        if isinstance(packed, Tensor):
            return packed
        offloaded, dtype, shape, stride, offset = packed
        if not self.in_backward:
            self.in_backward = True
            self.stream.throttle(None)
        flat, event = offloaded.fetch()
        if self.previous is not None:  # the backward pass reaches the previous layer next: begin its copies
            for other in list(self.previous.offloaded):
                other.fetch()
            self.previous = None
        if event is not None:
            current = torch.cuda.current_stream(self.stream.device)
            current.wait_event(event)
            flat.record_stream(current)
        tensor: Tensor = flat.view(dtype).as_strided(shape, stride, offset)
        return tensor


def _is_weight(tensor: Tensor) -> bool:
    """Return True for a parameter, a view of one, and either of these cast to another dtype."""
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter):
        return True
    node = base.grad_fn
    if node is None or not node.name().startswith("ToCopyBackward"):
        return False
    source = node.next_functions[0][0]
    return source is not None and isinstance(getattr(source, "variable", None), nn.Parameter)


def offload_wrappers(stream: OffloadStream, layers: int) -> list[Wrapper]:
    """Return a wrapper (see `kumi.nn.wrappers`) for each of `layers` consecutive layers that keeps the layer's saved
    tensors on the host.

    With recomputation, the wrapper belongs around `Recompute`: it then offloads the layer's input.
    """
    last: list[LayerScope | None] = [None]
    return [partial(_offload_saved_tensors, stream, last, index == 0) for index in range(layers)]


def _offload_saved_tensors(
    stream: OffloadStream,
    last: list[LayerScope | None],
    first: bool,
    inner: Callable[..., Any],
    x: Tensor,
    context: AttentionContext,
) -> Any:
    """Return `inner(x, context)`, the result of a layer, and offload the tensors that the layer saves.

    `last`: a list with the scope of the previous layer, which this layer's scope replaces.
    `first`: the layer is the first one.
    """
    if not torch.is_grad_enabled():
        return inner(x, context)
    tables = [table.untyped_storage().data_ptr() for pair in context.cos_sin.values() for table in pair]
    scope = LayerScope(stream, None if first else last[0], set(tables))
    last[0] = scope
    second_to_last = scope.previous.previous if scope.previous else None
    stream.throttle(second_to_last.d2h_event if second_to_last else None)
    with saved_tensors_hooks(scope.pack, scope.unpack):
        out = inner(x, context)
    scope.saved.clear()
    return out
