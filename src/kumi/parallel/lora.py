"""Adapters in a decoder that is laid onto the mesh: made, connected to the ranks that share a layer, and filled.

Frozen parameters are kept in the compute dtype, for nothing is added to them; adapters in that of the masters. What
ranks hold of an adapter follows from the ledger: beside a matrix cut by columns B is cut, beside one cut by rows A is,
and the other is the same on all ranks, which each have a part of its gradient.
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
from kumi.nn.lora import LoraLinear, Moment, adapt, lora_linears
from kumi.nn.nf4 import pack, take_out
from kumi.nn.wrappers import Around
from kumi.parallel.grad_norm import by_name
from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import stages_of
from kumi.parallel.state_tensors import Reader, fill, parameter_name
from kumi.parallel.token_collectives import summed
from kumi.spec.adapters import base_weight_name, is_adapter
from kumi.spec.ledger import ops
from kumi.spec.model import ModelSpec
from kumi.spec.precision import Precision
from kumi.spec.sharding import tp_style
from kumi.storage.write import Piece


def add_adapters(decoder: Decoder, mesh: Mesh, precision: Precision) -> None:
    """Freezes `decoder`, which is whole and on the meta device, and gives it the adapters that its spec names."""
    lora = decoder.spec.lora
    if lora is None:
        return
    adapt(decoder, decoder.spec, lora, dtype=getattr(torch, precision.param))
    for parameter in decoder.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, precision.compute))
    if decoder.has_embedding and not lora_linears(decoder):
        raise LayoutError(
            f"the first pipeline stage has layers {', '.join(decoder.model.layers) or 'none'}, none with an adapter "
            f"(lora.target_modules = {list(lora.targets)}), and so nothing to train; use fewer stages, or more targets"
        )


def connect(decoder: Decoder, mesh: Mesh) -> None:
    """Tells the adapters of `decoder`, which has been cut, what of their input and of their matrix is here."""
    lora = decoder.spec.lora
    if lora is None:
        return
    there, group, tp = dict(decoder.named_modules()), mesh.group("tp"), mesh.index("tp")
    moment = Moment(data=mesh.layout.dp_index(mesh.rank) * mesh.layout.cp + mesh.index("cp"))
    decoder.moment = moment  # type: ignore[assignment]
    for op in ops(decoder.spec):
        layer = there.get(op.name)
        if not isinstance(layer, LoraLinear):
            continue
        layer.moment = moment
        layer.part = tp if tp_style(op) == "row" or mesh.layout.sequence_parallel else 0
        if tp_style(op) == "row" and group is not None:
            layer.sum_columns = partial(summed, group=group)
    if lora.dropout:
        decoder.register_forward_pre_hook(partial(_count, moment))


def _count(moment: Moment, decoder: nn.Module, _: Any) -> None:
    if decoder.training and torch.is_grad_enabled():
        moment.microbatch += 1


def begin_step(model: nn.Module, seed: int, number: int) -> None:
    """Tells the stages of `model` that update `number` of a run begins: what is dropped is a function of that."""
    for stage in stages_of(model).values():
        moment = getattr(stage, "moment", None)
        if moment is not None:
            moment.seed, moment.number, moment.microbatch = seed, number, 0


def drop_alike(decoder: Decoder, recompute: Around) -> list[Around]:
    """Return the wrappers, the innermost first, with which a layer that recomputes drops the same elements again.

    The outermost notes which microbatch the forward pass is of; the innermost, which is replayed, goes back to it.
    """
    lora = decoder.spec.lora
    if lora is None or not lora.dropout:
        return [recompute]
    moment: Any = decoder.moment
    return [partial(_at, moment), recompute, partial(_now, moment)]


def _now(moment: Moment, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return inner(*args, moment_of_forward=(moment.number, moment.microbatch), **kwargs)


def _at(
    moment: Moment, inner: Callable[..., Any], *args: Any, moment_of_forward: tuple[int, int], **kwargs: Any
) -> Any:
    before = moment.number, moment.microbatch
    moment.number, moment.microbatch = moment_of_forward
    try:
        return inner(*args, **kwargs)
    finally:
        moment.number, moment.microbatch = before


def fill_adapted(pieces: Sequence[Piece], spec: ModelSpec, base: int | Reader, adapters: int | Reader) -> None:
    """Fills frozen parameters from `base` and adapters from `adapters`, each a seed or a function that reads."""
    read = _drawn(spec, base) if isinstance(base, int) else base
    of_adapters = [piece for piece in pieces if is_adapter(piece.name)]
    fill([piece for piece in pieces if not is_adapter(piece.name)], read)
    fill(of_adapters, _first(spec, adapters, read, pieces) if isinstance(adapters, int) else adapters)


def to_pack(model: nn.Module) -> dict[str, Linear]:
    """The layers of `model`, by their names, whose frozen matrices are to be packed, and are no parameters any more."""
    found: dict[str, Linear] = {}
    for decoder in stages_of(model).values():
        if isinstance(decoder, Decoder) and decoder.spec.lora is not None and decoder.spec.lora.quantize:
            found |= take_out(decoder)
    return found


def fill_packed(
    layers: Mapping[str, Linear],
    spec: ModelSpec,
    mesh: Mesh,
    precision: Precision,
    base: int | Reader,
    adapters: int | Reader,
) -> None:
    """Packs the matrices of `layers`, one after the other, so that only one is there in full at a time."""
    read, known = _drawn(spec, base) if isinstance(base, int) else base, by_name(spec)
    for name, layer in layers.items():
        shape = known[f"{name}.weight"].shape
        matrix = read(f"model/{name}.weight", (0, 0), shape)
        pack(layer, matrix.to(mesh.device, getattr(torch, precision.compute)))
        if isinstance(layer, LoraLinear) and layer.lora_magnitude_vector is not None and isinstance(adapters, int):
            # B is zero: these are the norms of what was packed, not of what it was before.
            layer.lora_magnitude_vector.data.copy_(layer.row_norms())


def _drawn(spec: ModelSpec, seed: int) -> Reader:
    """Initial values of any part of a tensor, from a seed."""
    known = by_name(spec)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape)
        initialize.fill(out, known[parameter_name(name)], start, std=spec.initializer_range, seed=seed)
        return out

    return read


def _first(spec: ModelSpec, seed: int, base: Reader, pieces: Sequence[Piece]) -> Reader:
    """What adapters start from: their own draws, and the norms of the rows of the frozen matrices as they are kept."""
    known, drawn = by_name(spec), _drawn(spec, seed)
    kept = {piece.name: piece.data.dtype for piece in pieces}

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        param = known[parameter_name(name)]
        if param.init != "row norms":
            return drawn(name, start, shape)
        matrix = known[base_weight_name(param.name)]
        rows = base(f"model/{matrix.name}", (start[0], 0), (shape[0], matrix.shape[1]))
        rows = rows.to(kept.get(f"model/{matrix.name}", rows.dtype))
        norms: Tensor = torch.linalg.vector_norm(rows.to(wide(rows.dtype)), dim=1)
        return norms

    return read
