"""Add LoRA adapters to the operations of a layer, and freeze the other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from kumi.errors import ConfigError
from kumi.spec.lora import ALL_LINEAR, Lora
from kumi.spec.op import Activation, Dim, Op, Param

_ENDINGS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")


def has_adapter(lora: Lora, op: Op) -> bool:
    """True if the matrix of `op` gets an adapter from `lora`."""
    return can_adapt(op) and any(_is_target(target, op) for target in lora.targets)


def can_adapt(op: Op) -> bool:
    """True if `op` can have an adapter: it is a linear layer, and not a router or routed experts."""
    return op.kind == "linear" and not op.experts


def _is_target(target: str, op: Op) -> bool:
    """True if `target`, an entry of `Lora.targets`, selects `op`."""
    return target == ALL_LINEAR or op.name.endswith(f".{target}")


def add_adapters(lora: Lora, ops: Sequence[Op]) -> tuple[Op, ...]:
    """Return the operations `ops` of a layer with frozen parameters, followed by the operations of its adapters."""
    adapted = [op for op in ops if has_adapter(lora, op)]
    frozen_ops, index = [], 0
    while index < len(ops):
        same = _same_input(ops, index)
        # An input of matrices without adapters is not saved, because no gradient needs it.
        needed = not (can_adapt(ops[index]) and not any(op in adapted for op in same))
        frozen_ops += [_quantized(lora, freeze(op if needed else replace(op, saved=()))) for op in same]
        index += len(same)
    return (*frozen_ops, *(_adapter(lora, op) for op in adapted))


def _same_input(ops: Sequence[Op], index: int) -> Sequence[Op]:
    """Return the operation at `index`; if it is a matrix, also the matrices after it that share its saved input."""
    last = index + 1
    if can_adapt(ops[index]):
        while last < len(ops) and can_adapt(ops[last]) and ops[last].source == ops[index].source:
            if ops[last].saved:
                break
            last += 1
    return ops[index:last]


def freeze(op: Op) -> Op:
    """Return `op` with frozen parameters."""
    return replace(op, params=tuple(replace(param, frozen=True) for param in op.params), frozen=True)


def _quantized(lora: Lora, op: Op) -> Op:
    """Return `op` with a quantized matrix if `lora` quantizes."""
    if not (lora.quantize and can_adapt(op)):
        return op
    return replace(op, params=(replace(op.params[0], quantized=lora.quantize), *op.params[1:]))


def _adapter(lora: Lora, op: Op) -> Op:
    """Return the adapter of `op`.

    It saves the output of A, with dropout also the input of A, and with DoRA the product that the magnitude scales.
    """
    rank = Dim("lora", lora.r)
    inits = {"default": "kaiming", "gaussian": f"normal {1 / lora.r!r}"}
    params = [
        Param(f"{op.name}.lora_A.weight", (rank, op.source), inits[lora.init]),
        Param(f"{op.name}.lora_B.weight", (op.target, rank), "zeros"),
    ]
    saved = [Activation((rank,))]
    if lora.dropout:
        saved.append(Activation((op.source,)))
    if lora.use_dora:
        params.append(Param(f"{op.name}.lora_magnitude_vector", (op.target,), "row norms"))
        saved.append(Activation((op.target,)))
    return Op(f"{op.name}.lora", "lora", op.source, op.target, tuple(params), tuple(saved))


def is_adapter(name: str) -> bool:
    """True if the tensor `name` belongs to an adapter."""
    return name.endswith(_ENDINGS)


def base_weight_name(name: str) -> str:
    """Return the name of the adapted matrix, given the `name` of a tensor of its adapter."""
    for ending in _ENDINGS:
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight"
    raise ValueError(f"{name} is not a tensor of an adapter")


def check_targets(lora: Lora, ops: Sequence[Op], family: str) -> None:
    """Raise ConfigError unless each target names a matrix among `ops` that can have an adapter."""
    for target in lora.targets:
        if any(can_adapt(op) and _is_target(target, op) for op in ops):
            continue
        if any(op.experts and (op.name.endswith(f".{target}") or target in op.name) for op in ops):
            raise ConfigError(
                f"lora.target_modules: {target!r} names routed experts, which cannot have adapters, because the "
                f"matrices of all experts of a layer are one tensor; name some of {_adaptable(ops)}"
            )
        near = get_close_matches(target, _last_names(ops), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"lora.target_modules: no matrix in the layers of this {family} model is called {target!r}; {hint}"
            f"name some of {_adaptable(ops)}, or {ALL_LINEAR!r} for all of them"
        )


def _last_names(ops: Sequence[Op]) -> list[str]:
    return list(dict.fromkeys(op.name.rpartition(".")[2] for op in ops if can_adapt(op)))


def _adaptable(ops: Sequence[Op]) -> str:
    return ", ".join(_last_names(ops))
