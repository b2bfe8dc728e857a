"""Add LoRA adapters to the operations of a layer, and freeze the parameters that are not trained.

The operations are those of the ledger (`kumi.spec.ledger`), the list of what a model computes. The matrix of a linear
layer gets an adapter of two factors, A and B, as in `kumi.spec.lora`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from kumi.errors import ConfigError
from kumi.spec.lora import ALL_LINEAR, ROUTED_EXPERTS, Lora
from kumi.spec.op import Activation, Dim, Op, Param

# Endings of the names of an adapter's tensors: A, B and DoRA's magnitude.
_ENDINGS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
# The kinds of operations that `Lora.modules` may name.
_TRAINABLE = ("embedding", "positions", "norm", "log_prob", "score")
# The token table and the head, which have one weight if embeddings are tied.
_TIED = ("model.embed_tokens", "lm_head")
# Routed experts have a parameter where other layers have a module, so the names of their adapters' tensors end
# without a dot.
_EXPERT_ENDINGS = ("_lora_A", "_lora_B")


def has_adapter(lora: Lora, op: Op) -> bool:
    """True if the matrix of `op`, or the matrices of its experts, get an adapter from `lora`."""
    return op.kind == "linear" and any(_is_target(target, op) for target in lora.targets)


def can_adapt(op: Op) -> bool:
    """True if `op` is a linear layer, and not a router or routed experts."""
    return op.kind == "linear" and not op.experts


def _is_target(target: str, op: Op) -> bool:
    """True if `target`, an entry of `Lora.targets`, selects `op`.

    Only a target with the part "experts", such as "experts" or "experts.down_proj", selects routed experts.
    """
    if op.experts:
        return ROUTED_EXPERTS in target.split(".") and f".{target}." in f"{op.name}."
    return target == ALL_LINEAR or op.name.endswith(f".{target}")


def factor_names(op: Op) -> tuple[str, str]:
    """Return the names of A and B of the adapter of `op`."""
    endings = _EXPERT_ENDINGS if op.experts else _ENDINGS[:2]
    return f"{op.name}{endings[0]}", f"{op.name}{endings[1]}"


def add_adapters(lora: Lora, ops: Sequence[Op]) -> tuple[Op, ...]:
    """Return the operations `ops` of a layer, followed by those of its adapters.

    The parameters that `lora` does not train are frozen.
    """
    adapted = [op for op in ops if has_adapter(lora, op)]
    frozen_ops, index = [], 0
    while index < len(ops):
        same = _same_input(ops, index)
        # The input of matrices that have no adapters is not saved, because no gradient needs it.
        needed = ops[index].kind != "linear" or any(op in adapted for op in same)
        frozen_ops += [_quantized(lora, freeze_others(lora, op if needed else replace(op, saved=()))) for op in same]
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


def freeze_others(lora: Lora, op: Op, *, tied: bool = False) -> Op:
    """Return `op` with frozen parameters unless `lora` trains it in full.

    `tied`: the token table and the head have one weight, so an entry of `Lora.modules` that names one means both.
    """
    names = _TIED if tied and op.name in _TIED else (op.name,)
    if op.kind in _TRAINABLE and any(_is_module(module, name) for module in lora.modules for name in names):
        return op
    return replace(op, params=tuple(replace(param, frozen=True) for param in op.params), frozen=True)


def _is_module(module: str, name: str) -> bool:
    """True if `module`, an entry of `Lora.modules`, is the name of the operation `name` or its end."""
    return f".{name}".endswith(f".{module}")


def check_modules(lora: Lora, ops: Sequence[Op], family: str) -> None:
    """Raise ConfigError unless each entry of `lora.modules` names modules among `ops` that can be trained in full."""
    names = list(dict.fromkeys(op.name.rpartition(".")[2] for op in ops if op.kind in _TRAINABLE))
    for module in lora.modules:
        selected = [op for op in ops if (op.params or op.kind in _TRAINABLE) and _is_module(module, op.name)]
        if any(op.kind in _TRAINABLE for op in selected):
            continue
        other = selected[0] if selected else None
        if other is not None and lora.quantize and can_adapt(other):
            reason = f"names {other.name}, which lora.quantize={lora.quantize!r} keeps in four bits and cannot train"
        elif other is not None:
            reason = f"names {other.name}, and the weights of layers other than norms are trained by adapters only"
        else:
            near = get_close_matches(module, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            reason = f"no module of this {family} model is called so{hint}"
        raise ConfigError(
            f"lora.modules_to_save: {module!r}: {reason}; name some of {', '.join(names)}, or matrices in "
            f"lora.target_modules"
        )


def _quantized(lora: Lora, op: Op) -> Op:
    """Return `op` with a quantized matrix if `lora` quantizes."""
    if not (lora.quantize and can_adapt(op)):
        return op
    return replace(op, params=(replace(op.params[0], quantized=lora.quantize), *op.params[1:]))


def _adapter(lora: Lora, op: Op) -> Op:
    """Return the adapter of `op`. For routed experts, A and B have a leading dim: the adapters of all experts.

    It saves the output of A, with dropout also the input of A, and with DoRA the product that the magnitude scales.
    """
    rank, (a, b) = Dim("lora", lora.r), factor_names(op)
    experts = (Dim("experts", op.experts),) if op.experts else ()
    rows = (Dim("routed", round(op.passes)),) if op.experts else ()
    inits = {"default": f"kaiming {op.source.size}", "gaussian": f"normal {1 / lora.r!r}"}
    params = [
        # ZeRO shards the first dim after the experts: better the input dim, which is larger than the rank.
        Param(a, (*experts, op.source, rank) if experts else (rank, op.source), inits[lora.init]),
        Param(b, (*experts, op.target, rank), "zeros"),
    ]
    saved = [Activation((*rows, rank))]
    if lora.dropout:
        saved.append(Activation((*rows, op.source)))
    if lora.use_dora:
        params.append(Param(f"{op.name}.lora_magnitude_vector", (op.target,), "row norms"))
        saved.append(Activation((op.target,)))
    return Op(
        f"{op.name}.lora", "lora", op.source, op.target, tuple(params), tuple(saved), op.passes, experts=op.experts
    )


def is_adapter(name: str) -> bool:
    """True if the tensor `name` belongs to an adapter."""
    return name.endswith((*_ENDINGS, *_EXPERT_ENDINGS))


def base_weight_name(name: str) -> str:
    """Return the name of the adapted matrix, given the `name` of a tensor of its adapter."""
    for ending in _ENDINGS:
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}.weight"
    for ending in _EXPERT_ENDINGS:
        if name.endswith(ending):
            return name.removesuffix(ending)
    raise ValueError(f"{name} is not a tensor of an adapter")


def check_targets(lora: Lora, ops: Sequence[Op], family: str) -> None:
    """Raise ConfigError unless each target names a matrix among `ops` that can have the adapters of `lora`."""
    for target in lora.targets:
        selected = [op for op in ops if _is_target(target, op)]
        if any(op.experts for op in selected):
            _check_experts(lora, target)
        if selected or target == ALL_LINEAR:
            continue
        if any(op.experts and op.name.endswith(f".{target}") for op in ops):
            raise ConfigError(
                f"lora.target_modules: {target!r} names a matrix of routed experts only, which is selected by "
                f"{f'{ROUTED_EXPERTS}.{target}'!r}; write that, or some of {_adaptable(ops)}"
            )
        if ROUTED_EXPERTS in target.split("."):
            raise ConfigError(
                f"lora.target_modules: {target!r}: {_experts_of(ops, family)}; name some of {_adaptable(ops)}"
            )
        near = get_close_matches(target, _last_names(ops), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"lora.target_modules: no matrix in the layers of this {family} model is called {target!r}; {hint}"
            f"name some of {_adaptable(ops)}, or {ALL_LINEAR!r} for all of them"
        )


def _experts_of(ops: Sequence[Op], family: str) -> str:
    """Return a sentence that lists the matrices of routed experts among `ops`, as targets."""
    names = dict.fromkeys(f"{ROUTED_EXPERTS}.{op.name.rpartition('.')[2]}" for op in ops if op.experts)
    if not names:
        return f"this {family} model has no routed experts"
    return f"the routed experts of this {family} model have {', '.join(names)}"


def _check_experts(lora: Lora, target: str) -> None:
    """Raise ConfigError if `lora` has a setting that PEFT does not load for adapters of routed experts."""
    for key, value, other in (("dropout", lora.dropout, "0"), ("use_dora", lora.use_dora, "false")):
        if value:
            raise ConfigError(
                f"lora.{key}={str(value).lower()} with {target!r} in lora.target_modules: PEFT computes adapters of "
                f"routed experts from their weights, where it supports neither dropout nor DoRA, and would not load "
                f"them; set lora.{key} = {other}, or leave {target!r} out"
            )


def _last_names(ops: Sequence[Op]) -> list[str]:
    """Return the last parts of the names of the matrices in `ops` that are not routed experts, each once."""
    return list(dict.fromkeys(op.name.rpartition(".")[2] for op in ops if can_adapt(op)))


def _adaptable(ops: Sequence[Op]) -> str:
    """Return a list of the targets that select matrices in `ops`, for messages."""
    return ", ".join([*_last_names(ops), *([repr(ROUTED_EXPERTS)] if any(op.experts for op in ops) else [])])
