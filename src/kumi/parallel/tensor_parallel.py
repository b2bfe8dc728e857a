"""Tensor parallelism: matrices are cut over the tp ranks as the ledger says, and so, with sequence parallelism, are the
tokens between them.

A region (attention, a feed-forward layer, a shared expert) begins with matrices cut by columns and ends with one cut by
rows (Shoeybi et al., 2019, arXiv:1909.08053). What goes over the wire, for hidden states (T, D) of a microbatch:

                        forward                     backward
    plain               total at the end            total at the beginning
    sequence parallel   gather, then scatter        gather, then scatter; and gather again for the weights' gradients,
                                                    since only this rank's part of the input is kept

(Korthikanti et al., 2022, arXiv:2205.05198). Nothing here knows a model family: `kumi.spec.sharding.tp_style` says
which matrix is cut how, `shard_shape` how large the rank's part is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from kumi.nn.decoder import Decoder
from kumi.nn.linear import Linear, add_gradients
from kumi.nn.lora import LoraLinear, complete_all
from kumi.nn.norm import RMSNorm
from kumi.nn.tp_block import Region
from kumi.parallel.grad_norm import by_name, local
from kumi.parallel.mesh import Mesh
from kumi.parallel.token_collectives import (
    GATHER,
    SCATTER,
    SUM,
    define,
    fan_out,
    gather,
    gathered,
    scatter,
    scattered,
    total,
)
from kumi.parallel.vocab_parallel import VocabularyPart
from kumi.spec.layout import Layout
from kumi.spec.ledger import ops
from kumi.spec.sharding import DIM_TO_AXIS, shard_shape, tp_style


def cut(decoder: Decoder, mesh: Mesh) -> None:
    """Leaves this rank's part of every parameter that tp, ep or expert_tp cuts, and makes the parts work together.

    The decoder must be on the meta device: nothing is copied.
    """
    _cut_parameters(decoder, mesh.layout)
    group = mesh.group("tp")
    if group is None:
        return
    sequence_parallel = mesh.layout.sequence_parallel
    region = SharedRegion(group, sequence_parallel, mesh.layout.recompute == "selective")
    for module, last in _regions(decoder):
        module.region = region
        last.adds_bias = False
    for norm in _cut_norms(decoder):
        norm.function = partial(_norm_of_parts, group)
    part = VocabularyPart(group, decoder.spec.vocab_size, sequence_parallel)
    if decoder.has_embedding:
        table = decoder.model.embed_tokens
        table.lookup = partial(_embed, decoder, part, group, sequence_parallel)
    positions = decoder.model.embed_positions
    if positions is not None and sequence_parallel:
        positions.lookup = partial(_positions_of_part, group)
    decoder.logits = part.logits
    decoder.log_probs = partial(decoder.log_probs, vocabulary=part)
    decoder.weighted_sum = partial(decoder.weighted_sum, vocabulary=part)


def _cut_parameters(decoder: Decoder, layout: Layout) -> None:
    known = by_name(decoder.spec)
    for name, parameter in list(decoder.named_parameters()):
        shape = shard_shape(known[name], layout.tp, layout.ep, layout.expert_tp)
        if shape != tuple(parameter.shape):
            path, _, leaf = name.rpartition(".")
            made = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            decoder.get_submodule(path).register_parameter(leaf, nn.Parameter(made, parameter.requires_grad))


def _regions(decoder: Decoder) -> Iterator[tuple[Any, Linear]]:
    """The modules whose matrices are cut, with the matrix that ends each."""
    there = dict(decoder.named_modules())
    for op in ops(decoder.spec):
        if tp_style(op) == "row" and not op.experts and op.name in there:
            last = there[op.name]
            assert isinstance(last, Linear)
            yield there[op.name.rpartition(".")[0]], last


def _cut_norms(decoder: Decoder) -> Iterator[RMSNorm]:
    """Norms over dims that are cut: their mean square is one over all ranks."""
    there = dict(decoder.named_modules())
    for op in ops(decoder.spec):
        if op.kind == "norm" and op.name in there and DIM_TO_AXIS.get(op.params[0].dims[0].name) == "tp":
            norm = there[op.name]
            assert isinstance(norm, RMSNorm)
            yield norm


def _norm_of_parts(group: dist.ProcessGroup, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """The norm over all ranks' parts of the last dim, given this rank's."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    size = x.shape[-1] * group.size()
    square = fan_out(total(values.square().sum(-1, keepdim=True), group), group) / size
    factor = 1 + weight if zero_centered else weight
    return (values * torch.rsqrt(square + eps) * factor).to(x.dtype)


def _embed(
    decoder: Decoder, part: VocabularyPart, group: dist.ProcessGroup, divide: bool, input_ids: Tensor, table: Tensor
) -> Tensor:
    """Hidden states (B, S, D), or this rank's of all tokens (T/n, D), from the rows of the table that ranks have."""
    rows, here = part.rows(input_ids)
    found = F.embedding(rows, table).to(decoder.compute_dtype) * here[..., None]
    return scatter(found.flatten(0, 1), group) if divide else total(found, group)


def _positions_of_part(group: dist.ProcessGroup, position_ids: Tensor, table: Tensor) -> Tensor:
    """The rows (T/n, D) of this rank's part of all tokens, given the positions (B, S) of all."""
    return F.embedding(position_ids.flatten().chunk(group.size())[group.rank()], table)


class SharedRegion(Region):
    """A region whose matrices are dealt out over `group`. With `sequence_parallel` hidden states come and go as this
    rank's part of all tokens, (T/n, D).

    `selective` recomputation keeps the results of operators: what leaves is then one operator, so that the sum is kept
    and not what goes into it. Recomputed whole, a layer stops at the last tensor that its backward pass reads: what
    leaves is then two, so that its last sum is not made again.
    """

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, selective: bool) -> None:
        self.group, self.sequence_parallel, self.selective = group, sequence_parallel, selective

    @property
    def place(self) -> tuple[int, int]:
        return self.group.rank(), self.group.size()

    def enter(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        if not self.sequence_parallel:
            x = fan_out(x, self.group)
            return tuple(layer(x) for layer in layers)
        weights = [layer.weight.to(x.dtype) for layer in layers]
        adapted = [layer for layer in layers if isinstance(layer, LoraLinear)]
        # Layers with adapters add their biases themselves.
        own = [None if layer in adapted else layer.bias for layer in layers]
        biases = [None if bias is None else bias.to(x.dtype) for bias in own]
        made: tuple[Tensor, ...] = _GatheredLinears.apply(x, self.group, layers, *weights, *biases)  # type: ignore[no-untyped-call]
        if not adapted:
            return made
        # Of what adapters make of the input, each rank has its own tokens': little enough to gather besides.
        reduced = gather(torch.cat([layer.reduced(x) for layer in adapted], dim=-1), self.group)
        return complete_all(made, layers, torch.split(reduced, [layer.lora.r for layer in adapted], -1))

    def share(self, x: Tensor) -> Tensor:
        return gather(x, self.group) if self.sequence_parallel else fan_out(x, self.group)

    def leave(self, x: Tensor, layer: Linear) -> Tensor:
        if self.selective and not isinstance(layer, LoraLinear):
            weight = layer.weight.to(x.dtype)
            out: Tensor = _SummedLinear.apply(x, weight, layer, self.group, self.sequence_parallel)  # type: ignore[no-untyped-call]
        else:
            summed = scatter if self.sequence_parallel else total
            out = summed(layer(x.flatten(0, -2) if self.sequence_parallel else x), self.group)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)


class _SummedLinear(torch.autograd.Function):
    """A matrix whose results are summed over the ranks, each of which gets all tokens' or, `divide`, its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Linear, group: dist.ProcessGroup, divide: bool) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.layer, ctx.group, ctx.divide, ctx.shape = layer, group, divide, x.shape
        out: Tensor = SUMMED_LINEAR(x, weight, divide, group.size(), group.group_name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = (gathered(grad, ctx.group) if ctx.divide else grad).flatten(0, -2)
        of_x = (grad @ weight).view(ctx.shape)
        if x is None:  # the weight is frozen
            return of_x, None, None, None, None
        if ctx.layer.later is not None:
            ctx.layer.later.append(partial(add_gradients, ctx.layer.weight, None, x.flatten(0, -2), grad))
            return of_x, None, None, None, None
        return of_x, grad.T @ x.flatten(0, -2), None, None, None


class _GatheredLinears(torch.autograd.Function):
    """Several matrices of one input that is gathered for them, and gathered again for their gradients: only the rank's
    own part is kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, layers: Sequence[Linear], *weights_and_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(layers)
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        ctx.group, ctx.layers = group, layers
        return tuple(LINEARS(x, list(weights), list(biases), group.size(), group.group_name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_whole = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            of_whole.addmm_(grad, weight)
        of_x = scattered(of_whole, ctx.group)
        if x is None:  # the weights are frozen
            return (of_x, *[None] * (2 + 2 * len(weights)))
        later = ctx.layers[0].later
        if later is not None:
            pairs = [(layer.weight, layer.bias) for layer in ctx.layers]
            later.append(_put_off(pairs, x, grads, ctx.group))
            return (of_x, *[None] * (2 + 2 * len(weights)))
        whole = gathered(x, ctx.group)
        biases = ctx.needs_input_grad[3 + len(weights) :]
        of_biases = [grad.sum(0) if needed else None for grad, needed in zip(grads, biases, strict=True)]
        return (of_x, None, None, *[grad.T @ whole for grad in grads], *of_biases)


def _linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], size: int, group: str) -> list[Tensor]:
    whole = GATHER(x, size, group)
    return [F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _fake_linears(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], size: int, group: str) -> list[Tensor]:
    return [x.new_empty(x.shape[0] * size, weight.shape[0]) for weight in weights]


# One operator, whose results selective recomputation keeps: what is gathered for them is not gathered again.
LINEARS = define(
    "gathered_linears",
    "(Tensor x, Tensor[] weights, Tensor?[] biases, int size, str group) -> Tensor[]",
    _linears,
    _fake_linears,
)


def _flops(x: tuple[int, ...], weights: list[tuple[int, ...]], biases: Any, size: int, *_: Any, **__: Any) -> int:
    return sum(2 * x[0] * size * prod(weight) for weight in weights)


register_flop_formula(torch.ops.kumi.gathered_linears)(_flops)


def _summed_linear(x: Tensor, weight: Tensor, divide: bool, size: int, group: str) -> Tensor:
    out = F.linear(x.flatten(0, -2) if divide else x, weight)
    summed: Tensor = SCATTER(out, size, group) if divide else SUM(out, group)
    return summed


def _fake_summed_linear(x: Tensor, weight: Tensor, divide: bool, size: int, group: str) -> Tensor:
    rows = (x.shape[:-1].numel() // size,) if divide else x.shape[:-1]
    return x.new_empty(*rows, weight.shape[0])


# One operator here, too: selective recomputation keeps the sum, not what goes into it.
SUMMED_LINEAR = define(
    "summed_linear",
    "(Tensor x, Tensor weight, bool divide, int size, str group) -> Tensor",
    _summed_linear,
    _fake_summed_linear,
)
register_flop_formula(torch.ops.kumi.summed_linear)(lambda x, weight, *_, **__: 2 * prod(x[:-1]) * prod(weight))


def _put_off(
    pairs: Sequence[tuple[nn.Parameter, nn.Parameter | None]],
    x: Tensor,
    grads: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> Callable[[], None]:
    """What is left to do for the weights of several matrices: one gathering of their input for all."""

    @torch.no_grad()
    def finish() -> None:
        whole = gathered(x, group)
        for (weight, bias), grad in zip(pairs, grads, strict=True):
            add_gradients(weight, bias, whole, grad)

    return finish


@torch.no_grad()
def clear_padding(model: nn.Module, mesh: Mesh) -> None:
    """Sets rows that stand for no token to zero, which they stay: they are never looked up and never likely."""
    for module in model.modules():
        if isinstance(module, Decoder) and module.spec.vocab_size % mesh.layout.tp:
            for part in (getattr(module.model, "embed_tokens", None), getattr(module, "lm_head", None)):
                if part is not None:
                    local(part.weight).zero_()
