"""The collectives and sends of a rank, as PyTorch's dispatcher sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_iter

from kumi.compat import name_of_group


class Message(NamedTuple):
    """A collective or a send; `kind` and `bytes` as in `kumi.plan.estimates.Collective`, `group` is a group's name."""

    kind: str
    group: str
    bytes: int


# Operator of torch.distributed -> kind; the bytes are those of the full tensor on one rank.
_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "send": "send",
}


def message_of(func: Any, args: tuple[Any, ...]) -> Message | None:
    """Return the message that the operator `func` of torch.distributed sends for `args`; None if it sends nothing."""
    kind = _KINDS.get(func._opname)
    if kind is None:
        return None
    sizes = [sum(tensor.nbytes for tensor in _tensors(argument)) for argument in args[:2]]
    # Of the input and the output of a collective, the larger one is the full tensor.
    size = sizes[0] if kind in ("all_reduce", "send") else max(sizes)
    return Message(kind, name_of_group(args), size)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]
