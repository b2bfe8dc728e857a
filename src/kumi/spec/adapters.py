"""The operations of a layer with adapters: which of its matrices get one, what is trained and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from kumi.errors import ConfigError
from kumi.spec.lora import ALL, Lora
from kumi.spec.op import Activation, Dim, Op, Param

_ENDINGS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")


def takes(lora: Lora, op: Op) -> bool:
    """Whether the matrix of `op` gets an adapter."""
    return can_adapt(op) and any(_names(target, op) for target in lora.targets)


def can_adapt(op: Op) -> bool:
    """Whether an adapter can stand beside `op`: it is one matrix of a layer, and no router."""
    return op.kind == "linear" and not op.experts


def _names(target: str, op: Op) -> bool:
    return target == ALL or op.name.endswith(f".{target}")


def adapted(lora: Lora, ops: Sequence[Op]) -> tuple[Op, ...]:
    """The operations of a layer with frozen parameters, and after them its adapters."""
    taken = [op for op in ops if takes(lora, op)]
    found, index = [], 0
    while index < len(ops):
        same = _readers(ops, index)
        # What only frozen matrices read is not kept: no gradient needs it.
        needed = not (can_adapt(ops[index]) and not any(op in taken for op in same))
        found += [_quantized(lora, frozen(op if needed else replace(op, saved=()))) for op in same]
        index += len(same)
    return (*found, *(_adapter(lora, op) for op in taken))


def _readers(ops: Sequence[Op], index: int) -> Sequence[Op]:
    """The operation at `index` and, of a matrix, those after it that read the same input, which it keeps for all."""
    last = index + 1
    if can_adapt(ops[index]):
        while last < len(ops) and can_adapt(ops[last]) and ops[last].source == ops[index].source:
            if ops[last].saved:
                break
            last += 1
    return ops[index:last]


def frozen(op: Op) -> Op:
    """`op` with parameters that are not trained."""
    return replace(op, params=tuple(replace(param, frozen=True) for param in op.params), frozen=True)


def _quantized(lora: Lora, op: Op) -> Op:
    """`op` with its matrix in few bits, where `lora` says so."""
    if not (lora.quantize and can_adapt(op)):
        return op
    return replace(op, params=(replace(op.params[0], quantized=lora.quantize), *op.params[1:]))


def _adapter(lora: Lora, op: Op) -> Op:
    """The adapter beside `op`. Kept are A's result and, where they are not those of `op`, what A reads and what DoRA
    scales."""
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
    """Whether the tensor `name` belongs to an adapter."""
    return name.endswith(_ENDINGS)


def base_name(name: str) -> str:
    """The matrix beside which the adapter stands that the tensor `name` belongs to."""
    for ending in _ENDINGS:
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight"
    raise ValueError(f"{name} belongs to no adapter")


def check_targets(lora: Lora, ops: Sequence[Op], family: str) -> None:
    """Nothing, or a ConfigError for a target that names no matrix among `ops` that can have an adapter."""
    for target in lora.targets:
        if any(can_adapt(op) and _names(target, op) for op in ops):
            continue
        if any(op.experts and (op.name.endswith(f".{target}") or target in op.name) for op in ops):
            raise ConfigError(
                f"lora.target_modules: {target!r} names routed experts, whose matrices are one tensor for all of a "
                f"layer and get no adapters here; name matrices outside of them: {_known(ops)}"
            )
        near = get_close_matches(target, _leaves(ops), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"lora.target_modules: no matrix in the layers of this {family} model is called {target!r}; {hint}"
            f"it has {_known(ops)}, and {ALL!r} names them all"
        )


def _leaves(ops: Sequence[Op]) -> list[str]:
    return list(dict.fromkeys(op.name.rpartition(".")[2] for op in ops if can_adapt(op)))


def _known(ops: Sequence[Op]) -> str:
    return ", ".join(_leaves(ops))
