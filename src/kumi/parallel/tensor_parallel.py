"""Tensor parallelism: matrices are sharded over tp; with sequence parallelism, so are the tokens between blocks.

A block (attention, an MLP, a shared expert) begins with column-parallel matrices and ends with a row-parallel one
(Shoeybi et al., 2019, arXiv:1909.08053). Its collectives on n ranks, over the hidden states (T, D) of the T tokens of a
microbatch:

                        forward                       backward
    plain               all-reduce at the end         all-reduce at the beginning
    sequence parallel   all-gather, reduce-scatter    all-gather, reduce-scatter; and another all-gather for the weight
                                                      gradients, because only this rank's tokens are saved

(Korthikanti et al., 2022, arXiv:2205.05198). This module has no code for single architectures:
`kumi.spec.sharding.tp_style` says how a matrix is sharded, `shard_shape` how large its shard is.
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
from kumi.nn.lora import LoraLinear, add_adapter_outputs
from kumi.nn.norm import RMSNorm
from kumi.nn.score_head import reward_scores
from kumi.nn.tp_block import Projections
from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import local_shard, params_by_name
from kumi.parallel.token_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    all_gather,
    all_gather_no_grad,
    all_reduce,
    copy_to_group,
    define_collective,
    gather_results,
    reduce_scatter,
    reduce_scatter_no_grad,
)
from kumi.parallel.vocab_parallel import VocabularyShard
from kumi.spec.layout import Layout
from kumi.spec.ledger import ops
from kumi.spec.sharding import DIM_TO_AXIS, shard_shape, tp_style


def apply_tensor_parallel(decoder: Decoder, mesh: Mesh) -> None:
    """Shard the parameters of `decoder` over tp, ep and expert_tp, and replace the functions that need collectives.

    The decoder must be on the meta device: no values are copied.
    """
    _shard_parameters(decoder, mesh.layout)
    group = mesh.group("tp")
    if group is None:
        return
    sequence_parallel = mesh.layout.sequence_parallel
    projections = ShardedProjections(group, sequence_parallel, mesh.layout.recompute == "selective")
    for module, last in _blocks(decoder):
        module.projections = projections
        last.adds_bias = False  # `row_linear` adds the bias once, after the sum over ranks
    for norm in _sharded_norms(decoder):
        norm.function = partial(_sharded_rms_norm, group)
    vocabulary = VocabularyShard(group, decoder.spec.vocab_size, sequence_parallel)
    if decoder.has_embedding:
        table = decoder.model.embed_tokens
        table.lookup = partial(_embed, decoder, vocabulary, group, sequence_parallel)
    positions = decoder.model.embed_positions
    if positions is not None and sequence_parallel:
        positions.lookup = partial(_local_positions, group)
    decoder.vocabulary, decoder.logits = vocabulary, vocabulary.logits
    decoder.log_probs = partial(decoder.log_probs, vocabulary=vocabulary)
    decoder.weighted_sum = partial(decoder.weighted_sum, vocabulary=vocabulary)
    if sequence_parallel:
        decoder.scores = partial(_gathered_scores, group)


def _shard_parameters(decoder: Decoder, layout: Layout) -> None:
    """Replace every parameter that tp, ep or expert_tp shards by an uninitialised shard."""
    params = params_by_name(decoder.spec)
    for name, parameter in list(decoder.named_parameters()):
        shape = shard_shape(params[name], layout.tp, layout.ep, layout.expert_tp)
        if shape != tuple(parameter.shape):
            path, _, leaf = name.rpartition(".")
            shard = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            decoder.get_submodule(path).register_parameter(leaf, nn.Parameter(shard, parameter.requires_grad))


def _blocks(decoder: Decoder) -> Iterator[tuple[Any, Linear]]:
    """Yield the modules with sharded matrices, each with its row-parallel matrix."""
    modules = dict(decoder.named_modules())
    for op in ops(decoder.spec):
        if tp_style(op) == "row" and not op.experts and op.name in modules:
            last = modules[op.name]
            assert isinstance(last, Linear)
            yield modules[op.name.rpartition(".")[0]], last


def _sharded_norms(decoder: Decoder) -> Iterator[RMSNorm]:
    """Yield the norms over sharded dims, which need the mean square over all ranks."""
    modules = dict(decoder.named_modules())
    for op in ops(decoder.spec):
        if op.kind == "norm" and op.name in modules and DIM_TO_AXIS.get(op.params[0].dims[0].name) == "tp":
            norm = modules[op.name]
            assert isinstance(norm, RMSNorm)
            yield norm


def _sharded_rms_norm(group: dist.ProcessGroup, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Return this rank's shard of the RMS norm over a last dim that is sharded over `group`."""
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    size = x.shape[-1] * group.size()
    square = copy_to_group(all_reduce(values.square().sum(-1, keepdim=True), group), group) / size
    factor = 1 + weight if zero_centered else weight
    return (values * torch.rsqrt(square + eps) * factor).to(x.dtype)


def _embed(
    decoder: Decoder,
    vocabulary: VocabularyShard,
    group: dist.ProcessGroup,
    scatter: bool,
    input_ids: Tensor,
    table: Tensor,
) -> Tensor:
    """Return hidden states (B, S, D), or this rank's tokens (T/n, D) if `scatter`, from a sharded token table."""
    rows, here = vocabulary.rows(input_ids)
    hidden = F.embedding(rows, table).to(decoder.compute_dtype) * here[..., None]
    return reduce_scatter(hidden.flatten(0, 1), group) if scatter else all_reduce(hidden, group)


def _local_positions(group: dist.ProcessGroup, position_ids: Tensor, table: Tensor) -> Tensor:
    """Return the position embeddings (T/n, D) of this rank's tokens, given the positions (B, S) of all tokens."""
    return F.embedding(position_ids.flatten().chunk(group.size())[group.rank()], table)


def _gathered_scores(group: dist.ProcessGroup, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the scores (T,) of all tokens, given the final hidden states (T/n, D) of this rank's tokens."""
    return gather_results(reward_scores(hidden, weight), group)


class ShardedProjections(Projections):
    """The projections of a block whose matrices are sharded over `group`.

    `sequence_parallel`: hidden states are those of this rank's tokens, (T/n, D), on n ranks.
    `selective`: the layer recomputes selectively. `row_linear` is then one operator, so that its sum over ranks is
    saved and not the terms. Full recomputation stops at the last tensor that the backward pass needs; `row_linear` is
    then two operators, so that the layer's last sum is not repeated.
    """

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, selective: bool) -> None:
        self.group, self.sequence_parallel, self.selective = group, sequence_parallel, selective

    @property
    def rank_and_size(self) -> tuple[int, int]:
        return self.group.rank(), self.group.size()

    def column_linear(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Return this rank's columns of the output of each of `layers` for all tokens, given the hidden states `x`."""
        if not self.sequence_parallel:
            x = copy_to_group(x, self.group)
            return tuple(layer(x) for layer in layers)
        weights = [_weight(layer, x.dtype) for layer in layers]
        adapted = [layer for layer in layers if isinstance(layer, LoraLinear)]
        # Layers with adapters add their biases themselves.
        plain = [None if layer in adapted else layer.bias for layer in layers]
        biases = [None if bias is None else bias.to(x.dtype) for bias in plain]
        outputs: tuple[Tensor, ...] = _ColumnLinears.apply(x, self.group, layers, *weights, *biases)  # type: ignore[no-untyped-call]
        if not adapted:
            return outputs
        # Each rank computes A x of its own tokens; the results are small enough for another all-gather.
        downs = all_gather(torch.cat([layer.project_down(x) for layer in adapted], dim=-1), self.group)
        return add_adapter_outputs(outputs, layers, torch.split(downs, [layer.lora.r for layer in adapted], -1))

    def broadcast(self, x: Tensor) -> Tensor:
        """Return `x` of all tokens, for use by the heads or columns of every rank."""
        return all_gather(x, self.group) if self.sequence_parallel else copy_to_group(x, self.group)

    def row_linear(self, x: Tensor, layer: Linear) -> Tensor:
        """Return hidden states: the output of `layer` for this rank's columns `x`, summed over ranks."""
        if self.selective and not isinstance(layer, LoraLinear):
            weight = _weight(layer, x.dtype)
            out: Tensor = _RowLinear.apply(x, weight, layer, self.group, self.sequence_parallel)  # type: ignore[no-untyped-call]
        else:
            reduce = reduce_scatter if self.sequence_parallel else all_reduce
            out = reduce(layer(x.flatten(0, -2) if self.sequence_parallel else x), self.group)
        return out if layer.bias is None else out + layer.bias.to(out.dtype)


def _weight(layer: Linear, dtype: torch.dtype) -> Tensor | None:
    """Return the weight of `layer` in `dtype`, or None if it is packed in 4 bits: it is unpacked where it is needed."""
    return None if layer.packed is not None else layer.weight_in(dtype)


def _unpacked(weights: Sequence[Tensor | None], layers: Sequence[Linear], dtype: torch.dtype) -> list[Tensor]:
    """Return the `weights` of `layers` that `_weight` returned, unpacked."""
    pairs = zip(weights, layers, strict=True)
    return [layer.matrix().to(dtype) if weight is None else weight for weight, layer in pairs]


class _RowLinear(torch.autograd.Function):
    """A row-parallel matmul whose result is all-reduced, or reduce-scattered over tokens if `scatter`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, layer: Linear, group: dist.ProcessGroup, scatter: bool
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.layer, ctx.group, ctx.scatter, ctx.shape = layer, group, scatter, x.shape
        (matrix,) = _unpacked([weight], [layer], x.dtype)
        out: Tensor = ROW_LINEAR(x, matrix, scatter, group.size(), group.group_name)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = (all_gather_no_grad(grad, ctx.group) if ctx.scatter else grad).flatten(0, -2)
        (matrix,) = _unpacked([weight], [ctx.layer], grad.dtype)
        grad_x = (grad @ matrix).view(ctx.shape)
        if x is None:  # the weight is frozen
            return grad_x, None, None, None, None
        if ctx.layer.deferred_wgrads is not None:
            ctx.layer.deferred_wgrads.append(partial(add_gradients, ctx.layer.weight, None, x.flatten(0, -2), grad))
            return grad_x, None, None, None, None
        return grad_x, grad.T @ x.flatten(0, -2), None, None, None


class _ColumnLinears(torch.autograd.Function):
    """Column-parallel matmuls of an all-gathered input.

    Only this rank's tokens are saved; they are all-gathered again for the weight gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, layers: Sequence[Linear], *weights_and_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(layers)
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        ctx.group, ctx.layers = group, layers
        matrices = _unpacked(weights, layers, x.dtype)
        return tuple(COLUMN_LINEARS(x, matrices, list(biases), group.size(), group.group_name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        (first,) = _unpacked(weights[:1], ctx.layers[:1], grads[0].dtype)
        grad_full_x = grads[0] @ first
        for grad, weight, layer in zip(grads[1:], weights[1:], ctx.layers[1:], strict=True):
            grad_full_x.addmm_(grad, *_unpacked([weight], [layer], grad.dtype))
        grad_x = reduce_scatter_no_grad(grad_full_x, ctx.group)
        if x is None:  # the weights are frozen
            return (grad_x, *[None] * (2 + 2 * len(weights)))
        deferred = ctx.layers[0].deferred_wgrads
        if deferred is not None:
            pairs = [(layer.weight, layer.bias) for layer in ctx.layers]
            deferred.append(_deferred_wgrads(pairs, x, grads, ctx.group))
            return (grad_x, *[None] * (2 + 2 * len(weights)))
        full_x = all_gather_no_grad(x, ctx.group)
        biases = ctx.needs_input_grad[3 + len(weights) :]
        grad_biases = [grad.sum(0) if needed else None for grad, needed in zip(grads, biases, strict=True)]
        return (grad_x, None, None, *[grad.T @ full_x for grad in grads], *grad_biases)


def _column_linears(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], size: int, group: str
) -> list[Tensor]:
    full_x = ALL_GATHER(x, size, group)
    return [F.linear(full_x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _fake_column_linears(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], size: int, group: str
) -> list[Tensor]:
    return [x.new_empty(x.shape[0] * size, weight.shape[0]) for weight in weights]


# One operator, so that selective recomputation saves its results and does not repeat the all-gather.
COLUMN_LINEARS = define_collective(
    "gathered_linears",
    "(Tensor x, Tensor[] weights, Tensor?[] biases, int size, str group) -> Tensor[]",
    _column_linears,
    _fake_column_linears,
)


def _column_linears_flops(
    x: tuple[int, ...], weights: list[tuple[int, ...]], biases: Any, size: int, *_: Any, **__: Any
) -> int:
    return sum(2 * x[0] * size * prod(weight) for weight in weights)


register_flop_formula(torch.ops.kumi.gathered_linears)(_column_linears_flops)


def _row_linear(x: Tensor, weight: Tensor, scatter: bool, size: int, group: str) -> Tensor:
    out = F.linear(x.flatten(0, -2) if scatter else x, weight)
    summed: Tensor = REDUCE_SCATTER(out, size, group) if scatter else ALL_REDUCE(out, group)
    return summed


def _fake_row_linear(x: Tensor, weight: Tensor, scatter: bool, size: int, group: str) -> Tensor:
    rows = (x.shape[:-1].numel() // size,) if scatter else x.shape[:-1]
    return x.new_empty(*rows, weight.shape[0])


# One operator, so that selective recomputation saves the sum over ranks and not its terms.
ROW_LINEAR = define_collective(
    "summed_linear",
    "(Tensor x, Tensor weight, bool scatter, int size, str group) -> Tensor",
    _row_linear,
    _fake_row_linear,
)
register_flop_formula(torch.ops.kumi.summed_linear)(lambda x, weight, *_, **__: 2 * prod(x[:-1]) * prod(weight))


def _deferred_wgrads(
    pairs: Sequence[tuple[nn.Parameter, nn.Parameter | None]],
    x: Tensor,
    grads: Sequence[Tensor],
    group: dist.ProcessGroup,
) -> Callable[[], None]:
    """Return a function that adds the weight gradients of several matrices, with one all-gather of their input."""

    @torch.no_grad()
    def finish() -> None:
        full_x = all_gather_no_grad(x, group)
        for (weight, bias), grad in zip(pairs, grads, strict=True):
            add_gradients(weight, bias, full_x, grad)

    return finish


@torch.no_grad()
def zero_vocab_padding(model: nn.Module, mesh: Mesh) -> None:
    """Set the padding rows of token table and head to zero. They stay zero: no token looks them up or predicts them."""
    for module in model.modules():
        if isinstance(module, Decoder) and module.spec.vocab_size % mesh.layout.tp:
            for part in (getattr(module.model, "embed_tokens", None), getattr(module, "lm_head", None)):
                if part is not None:
                    local_shard(part.weight).zero_()
