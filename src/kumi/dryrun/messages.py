"""What a rank sends: collectives and messages to one rank, as PyTorch's dispatcher sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_iter

from kumi.compat import name_of_group


class Message(NamedTuple):
    """`kind` as in `kumi.plan.types.Collective`, which group it goes to, and its bytes as counted there."""

    kind: str
    group: str
    bytes: int


# Operators of torch.distributed by how what they send is counted: the whole tensor on one rank.
KINDS = {
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
    """What the operator `func` of torch.distributed sends when called with `args`; None where it sends nothing."""
    kind = KINDS.get(func._opname)
    if kind is None:
        return None
    sizes = [sum(tensor.nbytes for tensor in _tensors(one)) for one in args[:2]]
    # Of a collective from one tensor into another the whole is the larger.
    size = sizes[0] if kind in ("all_reduce", "send") else max(sizes)
    return Message(kind, name_of_group(args), size)


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_iter(value) if isinstance(one, Tensor)]
