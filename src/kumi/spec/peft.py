"""Which adapters a model gets, of those that can be saved for PEFT, whose modules are those of Hugging Face's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from kumi.errors import ConfigError
from kumi.spec.adapters import can_adapt, check_targets, takes
from kumi.spec.job import Job
from kumi.spec.ledger import ops
from kumi.spec.legality import UNTRAINED, Rule
from kumi.spec.lora import ALL, Lora
from kumi.spec.model import ModelSpec
from kumi.spec.op import Op
from kumi.spec.weights import files

# Where modules have other names in transformers 5, which is what PEFT sees, than tensors in files: what those of files
# begin with, and those in memory.
_IN_MEMORY = {
    "nemotron_h": ("backbone.", "model."),
    "gemma3": ("language_model.model.", "model.language_model."),
    "mistral3": ("language_model.model.", "model.language_model."),
    "qwen2_5_vl": ("model.", "model.language_model."),
    "nemotron_h_omni": ("language_model.backbone.", "language_model.model."),
}


def with_adapters(spec: ModelSpec, lora: Lora) -> ModelSpec:
    """`spec` with the adapters that `lora` names, "all-linear" spelled out. ConfigError for a target that cannot have
    one, or none that PEFT can read."""
    every = [op for op in ops(replace(spec, lora=None)) if op.kind == "linear"]
    check_targets(lora, every, spec.family)
    of_experts = _leaves_of_experts(spec)
    apart = {op: _unread(spec, op, of_experts) for op in every if can_adapt(op)}
    targets: list[str] = []
    for target in lora.targets:
        one = replace(lora, targets=(target,))
        reasons = [f"{op.name}, which PEFT {why}" for op, why in apart.items() if why and takes(one, op)]
        if target == ALL:
            targets += dict.fromkeys(_path(op) for op, why in apart.items() if not why)
        elif reasons:
            raise ConfigError(f"lora.target_modules: {target!r} names {reasons[0]}; name others")
        else:
            targets.append(target)
    if not targets:
        raise ConfigError(f"lora.target_modules: nothing in this {spec.family} model can have an adapter")
    found = replace(spec, lora=replace(lora, targets=tuple(dict.fromkeys(targets))))
    _check_magnitudes(found)
    return found


def _unread(spec: ModelSpec, op: Op, of_experts: set[str]) -> str:
    """What PEFT does that keeps it from reading an adapter beside `op`; nothing where it reads it."""
    if _modules(spec)[op.name].rpartition(".")[2] in of_experts:
        return f"takes for a matrix of the routed experts that this {spec.family} model has besides"
    # Their kernel multiplies with the matrix itself, and would leave an adapter out.
    return "refuses in Mamba layers" if op.name.endswith(".mamba.out_proj") else ""


def adapter_rules(job: Job) -> Iterator[Rule]:
    """Return what this version's trainer wants of a layout where `job` trains adapters."""
    if job.model.lora is None:
        return
    yield Rule(
        "adapters",
        lambda x: x.tiles == 1,
        lambda layout: f"tiles={layout.tiles} with [lora]: adapters stand beside whole matrices; set tiles = 1",
        scope=UNTRAINED,
    )
    yield Rule(
        "adapters",
        lambda x: job.precision.products != "float8",
        lambda layout: (
            "precision.kind='fp8' with [lora]: frozen matrices multiply in 16 bits; set precision.kind = 'bf16'"
        ),
        scope=UNTRAINED,
    )


def _path(op: Op) -> str:
    """The name of a matrix within its layer."""
    return ".".join(op.name.split(".")[3:])


def _leaves_of_experts(spec: ModelSpec) -> set[str]:
    """What modules of single experts are called, in files that have these one by one."""
    return {
        module_name(spec, name).rpartition(".")[2]
        for name, pieces in files(replace(spec, lora=None)).items()
        if pieces[0].param.dims[0].name == "experts" and len(pieces[0].part.shape) == 2
    }


@lru_cache(maxsize=8)
def _modules(spec: ModelSpec) -> Mapping[str, str]:
    """The module of Hugging Face in which each native matrix lies, by the name of its operation."""
    base = replace(spec, lora=None)
    return {
        piece.param.name.removesuffix(".weight"): module_name(spec, name)
        for name, pieces in files(base).items()
        for piece in pieces
    }


def module_name(spec: ModelSpec, stored: str) -> str:
    """The module whose matrix files call `stored`."""
    name, (in_files, memory) = stored.removesuffix(".weight"), _IN_MEMORY.get(spec.family, ("", ""))
    return memory + name.removeprefix(in_files) if in_files and name.startswith(in_files) else name


def _check_magnitudes(spec: ModelSpec) -> None:
    """Nothing, or a ConfigError where DoRA would have a magnitude for some of a module's rows only."""
    lora = spec.lora
    if lora is None or not lora.use_dora:
        return
    adapted = {op.name for op in ops(spec) if takes(lora, op)}
    for name, pieces in files(replace(spec, lora=None)).items():
        natives = [piece.param.name.removesuffix(".weight") for piece in pieces]
        own = [native for native in natives if native in adapted]
        if own and len(own) < len(natives):
            raise ConfigError(
                f"lora.use_dora: {module_name(spec, name)} is "
                f"{', '.join(native.rpartition('.')[2] for native in natives)} together, and DoRA has a magnitude for "
                f"each of its rows; name all of them in lora.target_modules, or set lora.use_dora = false"
            )
