"""Track the memory of all tensors, the FLOPs and the messages of a program.

    tracker = Tracker()
    tracker.track("params", parameters)
    with tracker:
        ...                          # any program on real or fake tensors
    tracker.peak()                   # bytes at the peak, by kind

Kinds are the states of training in `STATES`; gathered (parameters that FSDP2 has gathered); weights (parameters that
are cast or unpacked for use); the names that a program gives to parts of itself (`Tracker.of`); and activations, the
rest.

A storage counts from the operation that returns its first tensor until Python frees it. Its size may change meanwhile:
FSDP2 frees gathered parameters by resizing their storages to 0. The workspace of a kernel is not seen. Composite
operators of kumi run inside the tracker, so it sees their parts. The allocator's rounding and caching is not
included.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from kumi.dryrun.observed_messages import Message, message_of
from kumi.nn.attention.attention_operators import attention_backward_flops, attention_flops
from kumi.parallel.stage_modules import local_shard
from kumi.parallel.token_collectives import IMPLEMENTATIONS

# A storage of one of these kinds never changes its kind.
STATES = ("params", "grads", "optimizer", "reference", "critic")
# Without autograd, these composite operators reach the dispatcher in one piece; the tracker decomposes them.
_COMPOSITE = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
# In-place matmuls, which PyTorch's FLOP formulas lack -> the operator with the same formula.
_IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
# Operator of attention -> its formula, and the number of its first arguments (B, H, S, E), which the formula takes as
# (B, S, H, E). PyTorch 2.11's own formulas refuse fewer heads of keys than of queries.
_ATTENTION: dict[Any, tuple[Callable[..., int], int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention: (attention_flops, 3),
    torch.ops.aten._scaled_dot_product_flash_attention_backward: (attention_backward_flops, 4),
}
# Value that `.item()` of a fake tensor returns, by dtype; floats give 0.5, and integers 1.
_NUMBERS: dict[torch.dtype, float | bool] = {torch.bool: True}


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that tracks the operations inside it.

    `fake`: tensors have no values, and `.item()` returns a constant (see `_NUMBERS`).
    """

    def __init__(self, *, fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.messages: Counter[Message] = Counter()
        self.flops: Counter[str] = Counter()
        self.inside: dict[Any, Callable[..., Any]] = dict(IMPLEMENTATIONS)  # composite operator -> its implementation
        self.kind = "activations"
        # Storages are numbered in the order in which they are tracked, because addresses are used again.
        self._sizes: dict[int, tuple[int, int]] = {}  # address of a storage -> (number, bytes)
        self._kinds: list[str] = []  # number -> kind
        self._events: list[tuple[int, int]] = []  # (number, bytes allocated, or minus the bytes freed)
        self._parameters: set[int] = set()  # addresses of the storages of parameters

    def track(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count existing `tensors` as `kind`, also those that are tracked already, unless their kind is in `STATES`."""
        for tensor in tensors:
            shard = local_shard(tensor.detach())
            self._add(shard, kind)
            self._mark(shard, kind)
            if kind == "params":
                self._parameters.add(shard.untyped_storage()._cdata)

    def begin(self) -> None:
        """Reset FLOPs, messages and the peak; keep the tracked storages."""
        self.messages.clear()
        self.flops.clear()
        self._events = [(number, size) for number, size in self._sizes.values() if size]

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Count storages allocated inside this context as `kind`."""
        outer, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = outer

    def within(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that the storages that it allocates count as `kind`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.of(kind):
                return function(*args, **kwargs)

        return run

    def peak(self) -> dict[str, int]:
        """Return the bytes by kind at the peak since `begin`."""
        current = most = peak_index = 0
        for index, (_, change) in enumerate(self._events):
            current += change
            if current > most:
                most, peak_index = current, index
        sizes: defaultdict[str, int] = defaultdict(int)
        for number, change in self._events[: peak_index + 1]:
            sizes[self._kinds[number]] += change
        return {kind: size for kind, size in sizes.items() if size}

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Track storages that are resized in place inside this context."""
        original, tracker = torch.UntypedStorage.resize_, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = original(storage, size)
            if storage._cdata in tracker._sizes:
                tracker._update(storage, "gathered")
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(cls, "_local_tensor") or cls.__name__ == "DTensor" for cls in types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and self.fake:
            return _NUMBERS.get(args[0].dtype, 0.5 if args[0].is_floating_point() else 1)
        if func in self.inside:
            with self:
                return self.inside[func](*args, **kwargs)
        if func in _COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count the results, the FLOPs and the message of the operator `func`."""
        kind = self._kind_of(func, args, kwargs)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._add(tensor, kind)
        formula = flop_registry.get(_IN_PLACE.get(func._overloadpacket, func._overloadpacket))
        if func._overloadpacket in _ATTENTION:
            of_attention, tensors = _ATTENTION[func._overloadpacket]
            self.flops[func._opname] += of_attention(
                *((b, s, h, e) for b, h, s, e in (x.shape for x in args[:tensors]))
            )
        elif formula is not None:
            self.flops[func._opname] += formula(*args, **kwargs, out_val=out)
        if func.namespace == "c10d":
            message = message_of(func, args)
            if message is not None:
                self.messages[message] += 1

    def _kind_of(self, func: Any, args: Any, kwargs: Any) -> str:
        """Return the kind of the results of `func`; mark the arguments of FSDP2's own operators as gathered too."""
        if func.namespace == "fsdp":
            for tensor in tree_iter((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._mark(tensor, "gathered")
            return "gathered"
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._parameters:
            return "weights"
        return self.kind

    def _add(self, tensor: Tensor, kind: str) -> None:
        """Begin to track the storage of `tensor` as `kind`, or update its size if it is tracked already."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            self._update(storage, None)
            return
        number, size = len(self._kinds), storage.nbytes()
        self._kinds.append(kind)
        self._sizes[key] = number, size
        self._log(number, size)
        weakref.finalize(storage, self._freed, key)

    def _update(self, storage: torch.UntypedStorage, kind: str | None) -> None:
        """Record the new size of a tracked storage, and change its kind unless the old kind is in `STATES`."""
        number, size = self._sizes[storage._cdata]
        new_size = storage.nbytes()
        if new_size != size:
            self._sizes[storage._cdata] = number, new_size
            self._log(number, new_size - size)
        if kind is not None and self._kinds[number] not in STATES:
            self._kinds[number] = kind

    def _mark(self, tensor: Tensor, kind: str) -> None:
        """Change the kind of the storage of `tensor`, also in past events, unless the old kind is in `STATES`."""
        entry = self._sizes.get(tensor.untyped_storage()._cdata)
        if entry is not None and self._kinds[entry[0]] not in STATES:
            self._kinds[entry[0]] = kind

    def _freed(self, key: int) -> None:
        """Record that the storage `key` was freed."""
        number, size = self._sizes.pop(key)
        self._parameters.discard(key)
        self._log(number, -size)

    def _log(self, number: int, change: int) -> None:
        if change:
            self._events.append((number, change))
