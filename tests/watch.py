"""Count the messages that a rank sends through torch.distributed, by patching its functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# Function -> kind of message.
KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "isend": "send",
    "send": "send",
}


class Sent:
    """A context that counts the messages of this rank by (kind, group size, bytes of the unsharded tensor).

    For an all-to-all, the bytes are those of this rank's input. Unlike a dispatch mode, it also counts messages inside
    custom operators. If one function of torch.distributed calls another, the message counts once.
    """

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, int, int]] = Counter()
        self.depth = 0
        self.patches: list[Any] = []

    def __enter__(self) -> Sent:
        for name in KINDS:
            if hasattr(distributed_c10d, name):
                watched = self._watched(name, getattr(distributed_c10d, name))
                for module in (dist, distributed_c10d):
                    patch = mock.patch.object(module, name, watched)
                    patch.start()
                    self.patches.append(patch)
        return self

    def __exit__(self, *_: object) -> None:
        while self.patches:
            self.patches.pop().stop()

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.depth:
                self._count(name, [*args, *kwargs.values()])
            self.depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1

        return call

    def _count(self, name: str, values: list[Any]) -> None:
        tensors = [value.nbytes for value in values if isinstance(value, Tensor)]
        group = next((value for value in values if isinstance(value, dist.ProcessGroup)), dist.group.WORLD)
        assert group is not None
        size = tensors[1] if name == "all_to_all_single" else max(tensors)
        self.seen[KINDS[name], group.size(), size] += 1
