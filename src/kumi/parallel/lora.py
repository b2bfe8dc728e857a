"""Adapters of a sharded decoder: insert them, connect the ranks that shard a layer, and fill the adapters.

Frozen parameters are in the compute dtype, because no updates are added to them; adapters are in the dtype of the
master weights. An adapter adds the product B A of two low-rank factors to a matrix. In a column-parallel matrix, B is
sharded over tp; in a row-parallel one, A is. The other factor is replicated, and each rank has a partial gradient of
it. Adapters of routed experts are sharded likewise over ep and expert_tp. `kumi.spec.ledger`, the list of a model's
parameters, has the dims of adapters, from which their sharding follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from kumi.errors import LayoutError
from kumi.nn import initialize
from kumi.nn.decoder import Decoder
from kumi.nn.dtypes import wide
from kumi.nn.lora import DropoutPass, LoraLinear, insert_adapters
from kumi.nn.nf4 import round_to_nf4
from kumi.nn.wrappers import Wrapper
from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import params_by_name, stages_of
from kumi.parallel.state_tensors import PieceReader, fill_pieces, parameter_name
from kumi.parallel.token_collectives import all_reduce_no_grad
from kumi.spec.adapters import base_weight_name, is_adapter
from kumi.spec.ledger import ops, trained_names
from kumi.spec.lora import NF4_BLOCK
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision
from kumi.spec.sharding import tp_style
from kumi.storage.write import Piece


def add_adapters(decoder: Decoder, mesh: Mesh, precision: Precision) -> None:
    """Insert the adapters that the spec of `decoder` has, and freeze its other parameters; do nothing without adapters.

    The decoder is unsharded, on the meta device. Modules that the spec trains in full are not frozen. Frozen parameters
    are cast to the compute dtype. Raise LayoutError if the first pipeline stage has nothing to train.
    """
    lora = decoder.spec.lora
    if lora is None:
        return
    insert_adapters(decoder, decoder.spec, lora, dtype=getattr(torch, precision.param))
    for parameter in decoder.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, precision.compute))
    if decoder.has_embedding and not any(parameter.requires_grad for parameter in decoder.parameters()):
        raise LayoutError(
            f"the first pipeline stage has layers {', '.join(decoder.model.layers) or 'none'}, none with an adapter "
            f"(lora.target_modules = {list(lora.targets)}), so it has nothing to train; use fewer stages, more "
            f"targets, or lora.modules_to_save = ['embed_tokens']"
        )


def connect_adapters(decoder: Decoder, mesh: Mesh) -> None:
    """Set how each adapter of the sharded `decoder` draws dropout masks and sums over ranks."""
    lora = decoder.spec.lora
    if lora is None:
        return
    modules, group, tp = dict(decoder.named_modules()), mesh.group("tp"), mesh.index("tp")
    dropout_pass = DropoutPass(data_rank=mesh.layout.dp_index(mesh.rank) * mesh.layout.cp + mesh.index("cp"))
    decoder.dropout_pass = dropout_pass  # type: ignore[assignment]
    for op in ops(decoder.spec):
        layer = modules.get(op.name)
        if not isinstance(layer, LoraLinear):
            continue
        layer.dropout_pass = dropout_pass
        # tp ranks with different parts of the layer's input draw different masks.
        layer.part = tp if tp_style(op) == "row" or mesh.layout.sequence_parallel else 0
        if tp_style(op) == "row" and group is not None:
            # A rank has some columns of each row, whose norms DoRA needs.
            layer.sum_columns = partial(all_reduce_no_grad, group=group)
    if lora.dropout:
        decoder.register_forward_pre_hook(partial(_count_microbatch, dropout_pass))


def _count_microbatch(dropout_pass: DropoutPass, decoder: nn.Module, _: Any) -> None:
    if decoder.training and torch.is_grad_enabled():
        dropout_pass.microbatch += 1


def begin_dropout_step(model: nn.Module, seed: int, number: int) -> None:
    """Begin update `number` for the dropout of `model`. Masks are a function of the run's `seed`, update, microbatch,
    rank and layer."""
    for stage in stages_of(model).values():
        dropout_pass = getattr(stage, "dropout_pass", None)
        if dropout_pass is not None:
            dropout_pass.seed, dropout_pass.step, dropout_pass.microbatch = seed, number, 0


def replay_dropout(decoder: Decoder, recompute: Wrapper) -> list[Wrapper]:
    """Return wrappers, the innermost first, that make a recomputed layer use the dropout masks of its forward pass.

    The outermost wrapper passes on the step and the microbatch of the forward pass. The innermost, which is replayed,
    sets them.
    """
    lora = decoder.spec.lora
    if lora is None or not lora.dropout:
        return [recompute]
    dropout_pass: Any = decoder.dropout_pass
    return [partial(_set_pass, dropout_pass), recompute, partial(_pass_on, dropout_pass)]


def _pass_on(dropout_pass: DropoutPass, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `inner` with the present step and microbatch as the argument `forward_pass`, which recomputation saves."""
    return inner(*args, forward_pass=(dropout_pass.step, dropout_pass.microbatch), **kwargs)


def _set_pass(
    dropout_pass: DropoutPass, inner: Callable[..., Any], *args: Any, forward_pass: tuple[int, int], **kwargs: Any
) -> Any:
    """Call `inner` with `dropout_pass` set to the step and microbatch `forward_pass`."""
    before = dropout_pass.step, dropout_pass.microbatch
    dropout_pass.step, dropout_pass.microbatch = forward_pass
    try:
        return inner(*args, **kwargs)
    finally:
        dropout_pass.step, dropout_pass.microbatch = before


def fill_frozen_and_adapters(
    pieces: Sequence[Piece], spec: ModelSpec, precision: Precision, base: PieceReader, adapters: int | PieceReader
) -> None:
    """Fill the frozen parameters among `pieces` from `base`, and the trained ones from `adapters`, a seed or a reader.

    `pieces`: this rank's slices of the model's tensors.
    """
    trained, frozen, names = list[Piece](), list[Piece](), trained_names(spec)
    for piece in pieces:
        (trained if parameter_name(piece.name) in names else frozen).append(piece)
    fill_pieces(frozen, base)
    dtype = getattr(torch, precision.compute)
    fill_pieces(trained, _adapter_reader(spec, adapters, base, dtype) if isinstance(adapters, int) else adapters)


def draw_reader(spec: ModelSpec, seed: int) -> PieceReader:
    """Return a reader of initial values: a function that returns a slice of a parameter, drawn from `seed`."""
    params = params_by_name(spec)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape)
        initialize.fill(out, params[parameter_name(name)], start, std=spec.initializer_range, seed=seed)
        return out

    return read


def _adapter_reader(spec: ModelSpec, seed: int, base: PieceReader, dtype: torch.dtype) -> PieceReader:
    """Return a reader of the initial values of trained parameters.

    Adapters are drawn from `seed`, but DoRA's magnitudes are row norms: those of the frozen matrices that `base` reads,
    rounded to `dtype` or their quantized format. Modules that are trained in full begin as in `base`.
    """
    params, drawn = params_by_name(spec), draw_reader(spec, seed)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        param = params[parameter_name(name)]
        if not is_adapter(name):
            return base(name, start, shape)
        if param.init != "row norms":
            return drawn(name, start, shape)
        matrix = params[base_weight_name(param.name)]
        first, last, columns = start[0], start[0] + shape[0], matrix.shape[1]
        if matrix.quantized:
            # Quantized blocks are of the complete matrix: read from and to rows at which a block begins.
            step = NF4_BLOCK // gcd(NF4_BLOCK, columns)
            first, last = first // step * step, min(-(-last // step) * step, matrix.shape[0])
        rows = base(f"model/{matrix.name}", (first, 0), (last - first, columns)).to(dtype)
        rows = round_to_nf4(rows) if matrix.quantized else rows
        norms: Tensor = torch.linalg.vector_norm(rows.to(wide(rows.dtype)), dim=1)
        return norms[start[0] - first :][: shape[0]]

    return read
