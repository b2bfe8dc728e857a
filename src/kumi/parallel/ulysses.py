"""Ulysses: every rank has some positions of all heads, and for attention all positions of some heads (Jacobs et al.,
2023, arXiv:2309.14509).

An all-to-all brings a rank the queries, keys and values of its heads from all positions, and another takes the results
back. Between the two, attention is that of one device. Where ranks outnumber key heads, a key head goes to as many of
them as share its queries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.compat import group_by_name
from kumi.nn.attention.attention_context import Attend
from kumi.nn.attention.scores import PLAIN, Scores
from kumi.parallel.token_collectives import INSIDE


def ulysses_over(attend: Attend, group: dist.ProcessGroup) -> Attend:
    """The attention of rows of which the ranks of `group` have their positions; `attend` is that of whole rows."""

    def exchanged(
        q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        cp = group.size()
        k, v = (x.repeat_interleave(max(1, cp // x.shape[2]), dim=2) for x in (k, v))
        widths = [x.shape[2] // cp * x.shape[3] for x in (q, k, v)]
        # All heads of a rank side by side: (B, N, cp, heads of a rank x E).
        heads = torch.cat([x.reshape(*x.shape[:2], cp, -1) for x in (q, k, v)], dim=-1)
        whole = in_order(_all_to_all(heads.permute(2, 0, 1, 3), group))
        q, k, v = (
            part.reshape(*part.shape[:2], -1, x.shape[3])
            for part, x in zip(torch.split(whole, widths, dim=-1), (q, k, v), strict=True)
        )
        own_sinks = None if sinks is None else sinks.chunk(cp)[group.rank()]
        out = attend(q, k, v, window, own_sinks, scores.part(group.rank(), cp))
        back = _all_to_all(in_pieces(out.flatten(2), cp), group)
        return back.permute(1, 2, 0, 3).reshape(*back.shape[1:3], -1, v.shape[3])

    return exchanged


def in_order(pieces: Tensor) -> Tensor:
    """What the ranks had of rows, (cp, B, N, F), as rows (B, cp * N, F): rank i had pieces i and 2 * cp - 1 - i."""
    cp, rows, own, size = pieces.shape
    near, far = pieces.view(cp, rows, 2, own // 2, size).unbind(2)
    return torch.cat([near, far.flip(0)]).transpose(0, 1).reshape(rows, cp * own, size)


def in_pieces(whole: Tensor, cp: int) -> Tensor:
    """The inverse of `in_order`."""
    rows, length, size = whole.shape
    near, far = whole.reshape(rows, 2, cp, length // (2 * cp), size).unbind(1)
    return torch.stack([near, far.flip(1)], dim=2).transpose(0, 1).reshape(cp, rows, length // cp, size)


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of `x` (cp, ...) goes to rank i: the parts (cp, ...) of all ranks for this one."""
    out: Tensor = OPERATOR(x, group.group_name)
    return out


def _exchange(x: Tensor, group: str) -> Tensor:
    out = x.new_empty(x.shape)
    dist.all_to_all_single(out, x.contiguous(), group=group_by_name(group))
    return out


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return OPERATOR(grad, ctx.group), None


torch.library.define("kumi::all_to_all", "(Tensor x, str group) -> Tensor")
for _device in ("CPU", "CUDA"):
    torch.library.impl("kumi::all_to_all", _device, _exchange)
torch.library.register_fake("kumi::all_to_all", lambda x, group: x.new_empty(x.shape))
torch.library.register_autograd("kumi::all_to_all", _differentiate, setup_context=_save)

# The operator as PyTorch's dispatcher knows it: selective recomputation keeps its result.
OPERATOR = torch.ops.kumi.all_to_all.default
INSIDE[OPERATOR] = _exchange
