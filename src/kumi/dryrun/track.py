"""Every tensor's memory from its first use to its end, and what is computed and sent meanwhile.

    tracker = Tracker()
    tracker.hold("params", parameters)
    with tracker:
        ...                          # any program, over real tensors or fake ones
    tracker.peak()                   # bytes at the fullest moment, by kind

A storage counts from when an operation returns a tensor in it until Python lets go of it, and as large as it is at the
time: FSDP2 frees gathered parameters by shrinking theirs. What a kernel takes for itself and gives back is not seen;
operators of kumi that are made of others are looked into. What PyTorch's allocator rounds up and keeps comes on top.
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

from kumi.dryrun.messages import Message, message_of
from kumi.parallel.collectives import INSIDE
from kumi.parallel.grads import local

# Kinds that a storage keeps for good once it has one of them.
STATES = ("params", "grads", "optimizer")
# What comes whole where autograd does not take it apart: it is looked into.
WHOLE = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
# Products that add to their first argument, which PyTorch's table of FLOPs leaves out, by those that it has.
IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
# What a number that is read from a fake tensor is taken for, by the tensor's dtype.
NUMBERS: dict[torch.dtype, float | bool] = {torch.bool: True}


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operations inside of it. `fake`: numbers are not there to be read, and one half stands for them."""

    def __init__(self, *, fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.messages: Counter[Message] = Counter()
        self.flops: Counter[str] = Counter()
        self.inside: dict[Any, Callable[..., Any]] = dict(INSIDE)  # operators that are looked into, and what they do
        self.current = 0
        self.kind = "activations"
        self._sizes: dict[int, tuple[int, int]] = {}  # by storage: its number and its bytes
        self._kinds: list[str] = []  # by number
        self._events: list[tuple[int, int]] = []  # number, bytes that came or went
        self._parameters: set[int] = set()
        self._resize: Any = None

    def hold(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Counts `tensors`, there before anything is watched, as `kind`; those that are known already from now on."""
        for tensor in tensors:
            part = local(tensor.detach())
            self._add(part, kind)
            self._mark(part, kind)
            if kind == "params":
                self._parameters.add(part.untyped_storage()._cdata)

    def begin(self) -> None:
        """Forgets what was computed and sent, and the peak, but not what is held."""
        self.messages.clear()
        self.flops.clear()
        self._events = [(number, size) for number, size in self._sizes.values() if size]

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Where new storages are of `kind`."""
        kept, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = kept

    def within(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, of which new storages are of `kind`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.of(kind):
                return function(*args, **kwargs)

        return run

    def peak(self) -> dict[str, int]:
        """Bytes of every kind at the fullest moment since `begin`."""
        now = most = at = 0
        for place, (_, change) in enumerate(self._events):
            now += change
            if now > most:
                most, at = now, place
        sizes: defaultdict[str, int] = defaultdict(int)
        for number, change in self._events[: at + 1]:
            sizes[self._kinds[number]] += change
        return {kind: size for kind, size in sizes.items() if size}

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Where storages that shrink and grow in place are followed."""
        plain, tracker = torch.UntypedStorage.resize_, self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = plain(storage, size)
            if storage._cdata in tracker._sizes:
                tracker._changed(storage, "gathered")
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(one, "_local_tensor") or one.__name__ == "DTensor" for one in types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and self.fake:
            return NUMBERS.get(args[0].dtype, 0.5 if args[0].is_floating_point() else 1)
        if func in self.inside:
            with self:
                return self.inside[func](*args, **kwargs)
        if func in WHOLE:
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        self._seen(func, args, kwargs, out)
        return out

    def _seen(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        kind = self._kind_of(func, args, kwargs)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._add(tensor, kind)
        formula = flop_registry.get(IN_PLACE.get(func._overloadpacket, func._overloadpacket))
        if formula is not None:
            self.flops[func._opname] += formula(*args, **kwargs, out_val=out)
        if func.namespace == "c10d":
            message = message_of(func, args)
            if message is not None:
                self.messages[message] += 1

    def _kind_of(self, func: Any, args: Any, kwargs: Any) -> str:
        if func.namespace == "fsdp":
            for tensor in tree_iter((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self._mark(tensor, "gathered")
            return "gathered"
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._parameters:
            return "weights"
        return self.kind

    def _add(self, tensor: Tensor, kind: str) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            self._changed(storage, None)
            return
        number, size = len(self._kinds), storage.nbytes()
        self._kinds.append(kind)
        self._sizes[key] = number, size
        self._note(number, size)
        weakref.finalize(storage, self._gone, key)

    def _changed(self, storage: torch.UntypedStorage, kind: str | None) -> None:
        number, size = self._sizes[storage._cdata]
        now = storage.nbytes()
        if now != size:
            self._sizes[storage._cdata] = number, now
            self._note(number, now - size)
        if kind is not None and self._kinds[number] not in STATES:
            self._kinds[number] = kind

    def _mark(self, tensor: Tensor, kind: str) -> None:
        """Makes the storage of `tensor`, all its life, one of `kind`."""
        known = self._sizes.get(tensor.untyped_storage()._cdata)
        if known is not None and self._kinds[known[0]] not in STATES:
            self._kinds[known[0]] = kind

    def _gone(self, key: int) -> None:
        number, size = self._sizes.pop(key)
        self._parameters.discard(key)
        self._note(number, -size)

    def _note(self, number: int, change: int) -> None:
        if change:
            self.current += change
            self._events.append((number, change))
