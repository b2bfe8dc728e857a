"""What layers keep for the backward pass, on the host in between.

A layer's tensors leave the device as the layer saves them, beside its computation, and come back when the backward pass
has reached the layer after it. On the device are then those of two layers: the one at work, and one on its way.
What is a parameter, or one cast, stays where it is, as do the rotary tables, which all layers share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from kumi.nn.attention.attention_context import Where
from kumi.nn.wrappers import Around

# Tensors of fewer bytes are not worth a message.
SMALL = 4096


class Flow:
    """The way of a device's tensors to the host and back: streams on CUDA, none on a CPU, where both are one memory.
    `moved` counts the bytes that have left."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.moved = device, 0
        cuda = device.type == "cuda"
        self.down = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.up = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.marks: list[Any] = []

    def pace(self, gone: Any) -> None:
        """Waits until the device has begun the last layer but one and, if `gone` is an event, for that: a host that ran
        ahead would give out memory that is not free yet."""
        if self.up is None:
            return
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self.device))
        self.marks.append(mark)
        if len(self.marks) > 2:
            self.marks.pop(0).synchronize()
        if gone is not None:
            gone.synchronize()

    def leave(self, flat: Tensor) -> tuple[Tensor, Any]:
        """`flat` on the host, and the event after which it is there."""
        self.moved += flat.nbytes
        if self.down is None:
            return flat, None
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down):
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            flat.record_stream(self.down)  # its memory is not given away before it has been read
            there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(self.down)
        return host, there

    def come(self, host: Tensor, there: Any) -> tuple[Tensor, Any]:
        """`host` on the device, and the event after which it is there."""
        if self.up is None:
            return host, None
        with torch.cuda.stream(self.up):
            self.up.wait_event(there)
            flat = torch.empty(host.shape, dtype=host.dtype, device=self.device)
            flat.copy_(host, non_blocking=True)
            here = torch.cuda.Event()  # type: ignore[no-untyped-call]
            here.record(self.up)
        return flat, here


class Away:
    """All elements of a tensor's memory that is on the host; graphs hold it as long as they need it."""

    def __init__(self, flat: Tensor, visit: Visit) -> None:
        self.visit = visit
        self.host, self.there = visit.flow.leave(flat)
        self.back: tuple[Tensor, Any] | None = None

    def fetch(self) -> tuple[Tensor, Any]:
        """The elements on the device again, and the event after which they are; the first call sends them."""
        if self.back is None:
            self.back = self.visit.flow.come(self.host, self.there)
        return self.back


class Visit:
    """One forward pass of a layer: what has left during it, and the visit of the layer before."""

    def __init__(self, flow: Flow, before: Visit | None, stay: set[int]) -> None:
        self.flow, self.before, self.stay = flow, before, stay
        self.gone: Any = None  # the event after which all that left is on the host
        self.reached = False
        # With what was moved, so that no other tensor gets its memory, and is taken for it, while the layer runs.
        self.seen: dict[tuple[int, int], tuple[Tensor, Away]] = {}
        self.away: weakref.WeakSet[Away] = weakref.WeakSet()

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        known = storage.data_ptr() in self.stay or _is_weight(tensor)
        if known or storage.nbytes() < SMALL or tensor.device.type != self.flow.device.type:
            return tensor.detach() if tensor.grad_fn is not None and not known else tensor
        key = storage.data_ptr(), tensor._version
        if key not in self.seen:
            elements = storage.nbytes() // tensor.itemsize
            flat = tensor.detach().as_strided((elements,), (1,), 0)
            away = Away(flat, self)
            self.seen[key] = flat, away
            self.away.add(away)
            self.gone = away.there
        return self.seen[key][1], tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        away, dtype, shape, stride, offset = packed
        if not self.reached:
            self.reached = True
            self.flow.pace(None)
        flat, here = away.fetch()
        if self.before is not None:
            for other in list(self.before.away):
                other.fetch()
            self.before = None
        if here is not None:
            stream = torch.cuda.current_stream(self.flow.device)
            stream.wait_event(here)
            flat.record_stream(stream)
        found: Tensor = flat.view(dtype).as_strided(shape, stride, offset)
        return found


def _is_weight(tensor: Tensor) -> bool:
    """Whether `tensor` is a parameter, a view of one, or either in another dtype."""
    whole = tensor if tensor._base is None else tensor._base
    if isinstance(whole, nn.Parameter):
        return True
    node = whole.grad_fn
    if node is None or not node.name().startswith("ToCopyBackward"):
        return False
    source = node.next_functions[0][0]
    return source is not None and isinstance(getattr(source, "variable", None), nn.Parameter)


def keepers(flow: Flow, layers: int) -> list[Around]:
    """Return one wrapper for each of `layers` layers that run one after the other, in their order.

    A wrapped layer keeps on the host what its backward pass needs. Where layers recompute, the wrapper belongs around
    `Recompute`: it then moves the layer's input.
    """
    last: list[Visit | None] = [None]
    return [partial(_moving, flow, last, number == 0) for number in range(layers)]


def _moving(
    flow: Flow, last: list[Visit | None], first: bool, inner: Callable[..., Any], x: Tensor, where: Where
) -> Any:
    if not torch.is_grad_enabled():
        return inner(x, where)
    tables = [table.untyped_storage().data_ptr() for pair in where.tables.values() for table in pair]
    visit = Visit(flow, None if first else last[0], set(tables))
    last[0] = visit
    earlier = visit.before.before if visit.before else None
    flow.pace(earlier.gone if earlier else None)
    with saved_tensors_hooks(visit.pack, visit.unpack):
        out = inner(x, where)
    visit.seen.clear()
    return out
