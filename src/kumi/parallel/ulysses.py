"""Ulysses: a rank has some positions of all heads, and during attention all positions of some heads (Jacobs et al.,
2023, arXiv:2309.14509).

An all-to-all sends each rank the queries, keys and values of its heads at all positions; a second one sends the results
back. In between, attention is the same as on one device. If there are more ranks than key heads, a key head is sent to
all ranks that have its query heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kumi.compat import group_by_name
from kumi.nn.attention.attention_context import AttentionFn
from kumi.nn.attention.scores import PLAIN_SCORES, Scores
from kumi.parallel.token_collectives import IMPLEMENTATIONS


def ulysses_attention_fn(attend: AttentionFn, group: dist.ProcessGroup) -> AttentionFn:
    """Return an attention function for rows that are sharded over `group`.

    `attend`: an attention function for unsharded rows.
    """

    def attend_after_exchange(
        q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None, scores: Scores = PLAIN_SCORES
    ) -> Tensor:
        cp = group.size()
        k, v = (x.repeat_interleave(max(1, cp // x.shape[2]), dim=2) for x in (k, v))
        widths = [x.shape[2] // cp * x.shape[3] for x in (q, k, v)]
        # (B, N, cp, F): for each rank that receives them, the F elements of its heads of q, k and v side by side.
        heads = torch.cat([x.reshape(*x.shape[:2], cp, -1) for x in (q, k, v)], dim=-1)
        rows = to_sequence_order(_all_to_all(heads.permute(2, 0, 1, 3), group))
        q, k, v = (
            part.reshape(*part.shape[:2], -1, x.shape[3])
            for part, x in zip(torch.split(rows, widths, dim=-1), (q, k, v), strict=True)
        )
        local_sinks = None if sinks is None else sinks.chunk(cp)[group.rank()]
        out = attend(q, k, v, window, local_sinks, scores.part(group.rank(), cp))
        back = _all_to_all(to_rank_order(out.flatten(2), cp), group)
        return back.permute(1, 2, 0, 3).reshape(*back.shape[1:3], -1, v.shape[3])

    return attend_after_exchange


def to_sequence_order(shards: Tensor) -> Tensor:
    """Return the shards (cp, B, N, F) of all ranks as rows (B, cp * N, F).

    The shard of rank i has the pieces i and 2 * cp - 1 - i of each row.
    """
    cp, rows, length, size = shards.shape
    near, far = shards.view(cp, rows, 2, length // 2, size).unbind(2)
    return torch.cat([near, far.flip(0)]).transpose(0, 1).reshape(rows, cp * length, size)


def to_rank_order(x: Tensor, cp: int) -> Tensor:
    """Return the inverse of `to_sequence_order`."""
    rows, length, size = x.shape
    near, far = x.reshape(rows, 2, cp, length // (2 * cp), size).unbind(1)
    return torch.stack([near, far.flip(1)], dim=2).transpose(0, 1).reshape(cp, rows, length // cp, size)


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x[i] of `x` (cp, ...) to rank i, and return the parts (cp, ...) that all ranks sent to this rank."""
    out: Tensor = ALL_TO_ALL(x, group.group_name)
    return out


def _exchange(x: Tensor, group: str) -> Tensor:
    out = x.new_empty(x.shape)
    dist.all_to_all_single(out, x.contiguous(), group=group_by_name(group))
    return out


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return ALL_TO_ALL(grad, ctx.group), None


torch.library.define("kumi::all_to_all", "(Tensor x, str group) -> Tensor")
for _device in ("CPU", "CUDA"):
    torch.library.impl("kumi::all_to_all", _device, _exchange)
torch.library.register_fake("kumi::all_to_all", lambda x, group: x.new_empty(x.shape))
torch.library.register_autograd("kumi::all_to_all", _differentiate, setup_context=_save)

# The operator in PyTorch's dispatcher. Selective recomputation saves its result. A dispatch mode can observe the
# collective inside it by means of `IMPLEMENTATIONS`.
ALL_TO_ALL = torch.ops.kumi.all_to_all.default
IMPLEMENTATIONS[ALL_TO_ALL] = _exchange
