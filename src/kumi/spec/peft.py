"""The adapters that a model can have: those that PEFT can load, under the module names of transformers 5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from kumi.errors import ConfigError
from kumi.spec.adapters import can_adapt, check_modules, check_targets, has_adapter, is_adapter
from kumi.spec.job import Job
from kumi.spec.ledger import ops, trained_names
from kumi.spec.legality import UNSUPPORTED, LayoutRule
from kumi.spec.lora import ALL_LINEAR, Lora
from kumi.spec.model import ModelSpec
from kumi.spec.op import Op
from kumi.spec.weights import stored_tensors

# Family -> the prefix of tensor names in files, and the prefix of module names in transformers 5, which PEFT uses;
# listed where the two differ.
_IN_MEMORY = {
    "gpt_neox": ("embed_out", "lm_head"),
    "nemotron_h": ("backbone.", "model."),
    "gemma3": ("language_model.model.", "model.language_model."),
    "mistral3": ("language_model.model.", "model.language_model."),
    "qwen2_5_vl": ("model.", "model.language_model."),
    "nemotron_h_omni": ("language_model.backbone.", "language_model.model."),
}


def with_adapters(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """Return `spec` with the adapters of `lora`, where "all-linear" is replaced by the list of matrices.

    A score head is trained in full beside the adapters, as PEFT does for sequence classifiers. Raise ConfigError for a
    target that cannot have an adapter, or whose adapter PEFT cannot load.
    """
    all_ops = ops(replace(spec, lora=None))
    linear_ops = [op for op in all_ops if op.kind == "linear"]
    check_targets(lora, linear_ops, spec.family)
    check_modules(lora, all_ops, spec.family)
    expert_leaves = _expert_leaves(spec)
    reasons = {op: _not_loadable(spec, op, expert_leaves) for op in linear_ops if can_adapt(op)}
    targets: list[str] = []
    for target in lora.targets:
        single = replace(lora, targets=(target,))
        refused = [f"{op.name}, which {why}" for op, why in reasons.items() if why and has_adapter(single, op)]
        if target == ALL_LINEAR:
            targets += dict.fromkeys(_path(op) for op, why in reasons.items() if not why)
        elif refused:
            raise ConfigError(f"lora.target_modules: {target!r} names {refused[0]}; name other matrices")
        else:
            targets.append(target)
    if not targets:
        raise ConfigError(
            f"lora.target_modules: no matrix of this {spec.family} model can have an adapter; train without [lora]"
        )
    modules = (*lora.modules, "score") if spec.head == "score" else lora.modules
    lora = replace(lora, targets=tuple(dict.fromkeys(targets)), modules=tuple(dict.fromkeys(modules)))
    adapted = replace(spec, lora=lora)
    _check_magnitudes(adapted)
    _check_whole(adapted)
    return adapted


def _not_loadable(spec: ModelSpec, op: Op, expert_leaves: set[str]) -> str:
    """Return why PEFT cannot load an adapter of `op`, as the end of "the matrix, which ..."; empty if it can."""
    if _modules(spec)[op.name].rpartition(".")[2] in expert_leaves:
        return f"PEFT would confuse with a matrix of the routed experts of this {spec.family} model"
    # The fused kernel multiplies by the weight itself, and would ignore an adapter.
    return "PEFT refuses in Mamba layers" if op.name.endswith(".mamba.out_proj") else ""


def adapter_rules(job: Job) -> Iterator[LayoutRule]:
    """Yield the trainer's rules for a `job` that trains adapters."""
    if job.model.lora is None:
        return
    yield LayoutRule(
        "adapters",
        lambda x: x.tiles == 1,
        lambda layout: (
            f"tiles={layout.tiles} is not supported with [lora], which needs undivided matrices; set tiles = 1"
        ),
        scope=UNSUPPORTED,
    )
    yield LayoutRule(
        "adapters",
        lambda x: job.precision.products != "float8",
        lambda layout: (
            "precision.kind='fp8' is not supported with [lora], because frozen matrices multiply in 16 bits; set "
            "precision.kind = 'bf16'"
        ),
        scope=UNSUPPORTED,
    )


def _path(op: Op) -> str:
    """Return the name of a matrix within its layer."""
    return ".".join(op.name.split(".")[3:])


def _expert_leaves(spec: ModelSpec) -> set[str]:
    """Return the last part of the names of single experts' matrices, in files with a tensor for each expert."""
    return {
        module_name(spec, name).rpartition(".")[2]
        for name, pieces in stored_tensors(replace(spec, lora=None)).items()
        if pieces[0].param.dims[0].name == "experts" and len(pieces[0].part.shape) == 2
    }


@lru_cache(maxsize=8)
def _modules(spec: ModelSpec) -> Mapping[str, str]:
    """Return the name of the transformers module that contains each matrix, by the name of the matrix in kumi."""
    base = replace(spec, lora=None)
    return {
        piece.param.name.removesuffix(".weight"): module_name(spec, name)
        for name, pieces in stored_tensors(base).items()
        for piece in pieces
    }


def module_name(spec: ModelSpec, stored: str) -> str:
    """Return the name of the transformers module whose weight has the name `stored` in files."""
    name, (in_files, memory) = stored.removesuffix(".weight"), _IN_MEMORY.get(spec.family, ("", ""))
    return memory + name.removeprefix(in_files) if in_files and name.startswith(in_files) else name


def _check_whole(spec: ModelSpec) -> None:
    """Raise ConfigError for a module that is trained in full, and that files store as a part of another."""
    trained = {name for name in trained_names(spec) if not is_adapter(name)}
    for name, pieces in stored_tensors(replace(spec, lora=None)).items():
        if any(piece.param.name in trained for piece in pieces) and not pieces[0].part.is_whole:
            raise ConfigError(
                f"lora.modules_to_save: {pieces[0].param.name} is a part of {module_name(spec, name)} in files, which "
                f"PEFT would train as a whole; name other modules"
            )


def _check_magnitudes(spec: ModelSpec) -> None:
    """Raise ConfigError if DoRA would have magnitudes for only some rows of a module's fused matrix."""
    lora = spec.lora
    if lora is None or not lora.use_dora:
        return
    adapted = {op.name for op in ops(spec) if has_adapter(lora, op)}
    for name, pieces in stored_tensors(replace(spec, lora=None)).items():
        natives = [piece.param.name.removesuffix(".weight") for piece in pieces]
        adapted_natives = [native for native in natives if native in adapted]
        if adapted_natives and len(adapted_natives) < len(natives):
            raise ConfigError(
                f"lora.use_dora=true needs adapters on all of "
                f"{', '.join(native.rpartition('.')[2] for native in natives)}, because they are fused in "
                f"{module_name(spec, name)} and DoRA has a magnitude for each of its rows; name all of them in "
                f"lora.target_modules, or set lora.use_dora = false"
            )
