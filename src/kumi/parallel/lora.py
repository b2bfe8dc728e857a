"""Adapters of a sharded decoder: insert them, connect the ranks that shard a layer, and fill the adapters.

Frozen parameters are in the compute dtype, because nothing is added to them; adapters are in the dtype of the master
weights. The ledger determines the sharding of an adapter. In a column-parallel matrix, B is sharded; in a row-parallel
one, A is. The other factor is replicated over tp, and each rank has a partial gradient of it. Adapters of routed
experts are sharded likewise over ep and expert_tp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kumi.errors import LayoutError
from kumi.nn import initialize
from kumi.nn.decoder import Decoder
from kumi.nn.dtypes import wide
from kumi.nn.linear import Linear
from kumi.nn.lora import DropoutPass, LoraLinear, insert_adapters
from kumi.nn.nf4 import pack_nf4, take_out_weights
from kumi.nn.wrappers import Wrapper
from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import params_by_name, stages_of
from kumi.parallel.state_tensors import PieceReader, fill_pieces, parameter_name
from kumi.parallel.token_collectives import all_reduce_no_grad
from kumi.spec.adapters import base_weight_name, is_adapter
from kumi.spec.ledger import ops, trained_names
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision
from kumi.spec.sharding import tp_style
from kumi.storage.write import Piece


def add_adapters(decoder: Decoder, mesh: Mesh, precision: Precision) -> None:
    """Freeze `decoder`, which is unsharded on the meta device, but for the adapters of its spec, which are inserted,
    and the modules that its spec trains in full.

    Raise LayoutError if the first pipeline stage has nothing to train.
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
        layer.part = tp if tp_style(op) == "row" or mesh.layout.sequence_parallel else 0
        if tp_style(op) == "row" and group is not None:
            layer.sum_columns = partial(all_reduce_no_grad, group=group)
    if lora.dropout:
        decoder.register_forward_pre_hook(partial(_count_microbatch, dropout_pass))


def _count_microbatch(dropout_pass: DropoutPass, decoder: nn.Module, _: Any) -> None:
    if decoder.training and torch.is_grad_enabled():
        dropout_pass.microbatch += 1


def begin_dropout_step(model: nn.Module, seed: int, number: int) -> None:
    """Begin update `number` for the dropout of `model`. Masks are a function of seed, update and microbatch."""
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
    return inner(*args, forward_pass=(dropout_pass.step, dropout_pass.microbatch), **kwargs)


def _set_pass(
    dropout_pass: DropoutPass, inner: Callable[..., Any], *args: Any, forward_pass: tuple[int, int], **kwargs: Any
) -> Any:
    before = dropout_pass.step, dropout_pass.microbatch
    dropout_pass.step, dropout_pass.microbatch = forward_pass
    try:
        return inner(*args, **kwargs)
    finally:
        dropout_pass.step, dropout_pass.microbatch = before


def fill_frozen_and_adapters(
    pieces: Sequence[Piece], spec: ModelSpec, base: int | PieceReader, adapters: int | PieceReader
) -> None:
    """Fill frozen parameters from `base` and trained ones from `adapters`; each is a seed or a reader."""
    read = _draw_reader(spec, base) if isinstance(base, int) else base
    trained = [piece for piece in pieces if parameter_name(piece.name) in trained_names(spec)]
    fill_pieces([piece for piece in pieces if parameter_name(piece.name) not in trained_names(spec)], read)
    fill_pieces(trained, _adapter_reader(spec, adapters, read, pieces) if isinstance(adapters, int) else adapters)


def take_packed_layers(model: nn.Module) -> dict[str, Linear]:
    """Remove the weights that will be packed as NF4 from `model`, and return their layers by name."""
    layers: dict[str, Linear] = {}
    for decoder in stages_of(model).values():
        if isinstance(decoder, Decoder) and decoder.spec.lora is not None and decoder.spec.lora.quantize:
            layers |= take_out_weights(decoder)
    return layers


def fill_packed_layers(
    layers: Mapping[str, Linear],
    spec: ModelSpec,
    mesh: Mesh,
    precision: Precision,
    base: int | PieceReader,
    adapters: int | PieceReader,
) -> None:
    """Read and pack the matrices of `layers` one at a time, so that only one unpacked matrix is in memory."""
    read, params = _draw_reader(spec, base) if isinstance(base, int) else base, params_by_name(spec)
    for name, layer in layers.items():
        shape = params[f"{name}.weight"].shape
        matrix = read(f"model/{name}.weight", (0, 0), shape)
        pack_nf4(layer, matrix.to(mesh.device, getattr(torch, precision.compute)))
        if isinstance(layer, LoraLinear) and layer.lora_magnitude_vector is not None and isinstance(adapters, int):
            # B is zero, so DoRA's magnitudes are the row norms of the packed matrix, with the rounding of packing.
            layer.lora_magnitude_vector.data.copy_(layer.row_norms())


def _draw_reader(spec: ModelSpec, seed: int) -> PieceReader:
    """Return a reader of initial values, drawn from `seed`."""
    params = params_by_name(spec)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape)
        initialize.fill(out, params[parameter_name(name)], start, std=spec.initializer_range, seed=seed)
        return out

    return read


def _adapter_reader(spec: ModelSpec, seed: int, base: PieceReader, pieces: Sequence[Piece]) -> PieceReader:
    """Return a reader of the initial values of trained parameters.

    Adapters are drawn from `seed`, but DoRA's magnitudes are row norms: those of the frozen matrices that `base` reads,
    in the dtype of their `pieces`. Modules that are trained in full begin as in `base`.
    """
    params, drawn = params_by_name(spec), _draw_reader(spec, seed)
    dtypes = {piece.name: piece.data.dtype for piece in pieces}

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        param = params[parameter_name(name)]
        if not is_adapter(name):
            return base(name, start, shape)
        if param.init != "row norms":
            return drawn(name, start, shape)
        matrix = params[base_weight_name(param.name)]
        rows = base(f"model/{matrix.name}", (start[0], 0), (shape[0], matrix.shape[1]))
        rows = rows.to(dtypes.get(f"model/{matrix.name}", rows.dtype))
        norms: Tensor = torch.linalg.vector_norm(rows.to(wide(rows.dtype)), dim=1)
        return norms

    return read
