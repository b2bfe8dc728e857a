"""Read LoRA and DoRA adapters in PEFT's format strictly: a setting that kumi does not understand is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from kumi.convert.files.safetensors_read import read_header
from kumi.convert.files.stored_tensor import entry_of, read_entry
from kumi.convert.hf.adapter_write import CONFIG, PREFIX, WEIGHTS, Module, modules
from kumi.convert.hf.expert_adapters import ExpertMatrix, expert_matrices, is_target, matrices_by_path
from kumi.convert.hf.full_modules import full_tensors, whole_tensors
from kumi.errors import ModelError
from kumi.files.untrusted import brief, inside, read_object
from kumi.paths import shown_path
from kumi.spec.adapters import factor_names, has_adapter
from kumi.spec.ledger import HEADS, ops
from kumi.spec.model import ModelSpec

# Keys of adapter_config.json that do not change the function that the adapters compute.
_NO_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "fan_in_fan_out",
)
# Keys whose values are checked, and the allowed types of these values.
_READ: dict[str, tuple[type, ...]] = {
    "peft_type": (str,),
    "bias": (str,),
    "r": (int, float),
    "lora_alpha": (int, float),
    "use_rslora": (bool,),
    "use_dora": (bool,),
    "rank_pattern": (dict,),
    "alpha_pattern": (dict,),
    "base_model_name_or_path": (str,),
    "revision": (str,),
    "target_parameters": (list,),
    "modules_to_save": (list,),
    "fan_in_fan_out": (bool,),
}
_TYPE_NAMES: dict[type, str] = {
    str: "a string",
    int: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}
# Upper bound for r (at most a matrix's width) and alpha (published adapters use up to 512).
_MAX = 1e6
# Initialisations that leave the base weights unchanged. Others (PiSSA, OLoRA ...) subtract from them.
_INITS = (True, False, "gaussian", "orthogonal", None)
# Ends of the names of an adapter's tensors in PEFT's files.
_ENDINGS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@dataclass(frozen=True)
class Adapter:
    """The adapter of a native matrix (out, in), which has kumi's name, or of the matrices (X, out, in) of X experts.

    a            (r, in), or (X, in, r)
    b            (out, r), or (X, out, r)
    scale        factor of the product b @ a
    magnitude    (out,) DoRA's row norms; None for LoRA
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None


def read_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json of `folder`; raise ModelError unless kumi understands every setting in it."""
    path = folder / CONFIG
    config = read_object(folder, CONFIG)
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type is {brief(config.get('peft_type'))}, and kumi reads LoRA and DoRA adapters only; "
            f"merge with peft instead"
        )
    known_keys = (*_NO_EFFECT, *_READ)
    for key, value in config.items():
        if value is not None and not _has_type(value, _READ.get(key, (object,))):
            raise ModelError(f"{path}: {key}={brief(value)} must be {_TYPE_NAMES[_READ[key][0]]}; fetch the file again")
        empty = value is None or value is False or value in ({}, [], "", 0)
        if key not in known_keys and not empty:
            raise ModelError(
                f"{path}: {key[:60]}={brief(value)} is a setting that kumi does not support; merge with peft instead"
            )
    if config.get("init_lora_weights", True) not in _INITS:
        raise ModelError(
            f"{path}: init_lora_weights={brief(config['init_lora_weights'])} changes the base weights; convert the "
            f"adapters with peft's path_initial_model_for_weight_conversion first"
        )
    if config.get("bias", "none") != "none":
        raise ModelError(
            f"{path}: bias={brief(config['bias'])}: kumi supports bias 'none' only; merge with peft instead"
        )
    return config


def read_adapters(folder: Path, spec: ModelSpec) -> dict[str, Adapter]:
    """Return the adapters in `folder`, in float32, by the native name of their matrix (without ".weight").

    Raise ModelError unless they are adapters of a model of `spec`.
    """
    config = read_config(folder)
    if not (folder / WEIGHTS).exists():
        raise ModelError(
            f"{folder}: has no {WEIGHTS}, and kumi does not open pickled adapters; save them again with peft"
        )
    by_name, by_module = modules(spec), dict[str, dict[str, Tensor]]()
    experts = matrices_by_path(
        matrix
        for matrix in expert_matrices(spec).values()
        if is_target(matrix.parameter, config.get("target_parameters") or ())
    )
    for name, span in read_header(inside(folder, WEIGHTS)).items():
        if _is_full(name, spec, config):
            continue
        ending = next((ending for ending in _ENDINGS if name.endswith(f".{ending}")), "")
        module = name.removeprefix(PREFIX).removesuffix(f".{ending}")
        if not ending or not name.startswith(PREFIX) or not (module in by_name or module in experts):
            raise ModelError(
                f"{folder / WEIGHTS}: {name!r} is not an adapter of a layer's matrix in this "
                f"{spec.family} model, and kumi would drop it; merge with peft instead"
            )
        by_module.setdefault(module, {})[ending] = read_entry(entry_of(span)).float()
    if not by_module:
        raise ModelError(f"{folder / WEIGHTS}: contains no adapters; fetch the file again")
    result: dict[str, Adapter] = {}
    for name, tensors in by_module.items():
        if name in experts:
            result[experts[name].native] = _of_experts(folder, config, experts[name], tensors)
        else:
            result |= _by_native(folder, config, by_name[name], tensors)
    return result


def has_score_head(folder: Path) -> bool:
    """True if the adapters in `folder` are a reward model's: they include its head."""
    return (folder / WEIGHTS).exists() and f"{PREFIX}{HEADS['score']}" in read_header(inside(folder, WEIGHTS))


def read_full_modules(folder: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Return the tensors in `folder` of modules that were trained in full, in float32, by native name.

    Raise ModelError unless they are tensors of a model of `spec`, and a tied head equals the token table.
    """
    config, result = read_config(folder), dict[str, Tensor]()
    for name, span in read_header(inside(folder, WEIGHTS)).items():
        if not _is_full(name, spec, config):
            continue
        tensor, whole = read_entry(entry_of(span)).float(), whole_tensors(spec)[name.removeprefix(PREFIX)]
        if tuple(tensor.shape) != whole.shape:
            raise ModelError(
                f"{folder / WEIGHTS}: {name!r} has the shape {tuple(tensor.shape)}, but the model has {whole.shape}; "
                f"the files belong to different models"
            )
        if whole.native in result and not result[whole.native].equal(tensor):
            raise ModelError(
                f"{folder / WEIGHTS}: the token table and the head differ, but this {spec.family} model ties them; "
                f"merge with peft instead"
            )
        result[whole.native] = tensor
    present = {name.removeprefix(PREFIX) for name in read_header(inside(folder, WEIGHTS))}
    for name, whole in whole_tensors(spec).items():
        if whole.native in result and name not in present and not config.get("ensure_weight_tying"):
            raise ModelError(
                f"{folder / WEIGHTS}: has no {name!r}, which this {spec.family} model ties to a tensor that was "
                f"trained, so the two differ; merge with peft instead"
            )
    return result


def _is_full(name: str, spec: ModelSpec, config: Mapping[str, Any]) -> bool:
    """True if `name` is a tensor of a module that `config` lists as trained in full."""
    tensor = name.removeprefix(PREFIX)
    module, listed = tensor.rpartition(".")[0], config.get("modules_to_save") or ()
    # PEFT takes each entry as the end of a module's name.
    return tensor in whole_tensors(spec) and any(module.endswith(str(entry)) for entry in listed)


def _of_experts(
    folder: Path, config: Mapping[str, Any], matrix: ExpertMatrix, tensors: Mapping[str, Tensor]
) -> Adapter:
    """Return the adapter of the experts' `matrix`."""
    r, scale = _rank_and_scale(folder, config, matrix.parameter)
    _check_shapes(folder, matrix.parameter, tensors, matrix.shapes(r))
    return Adapter(*matrix.factors(tensors), scale, None)


def _by_native(
    folder: Path, config: Mapping[str, Any], module: Module, tensors: Mapping[str, Tensor]
) -> dict[str, Adapter]:
    """Split the adapter of `module` into the adapters of its native matrices, by native name."""
    r, scale = _rank_and_scale(folder, config, module.name)
    expected: dict[str, tuple[int, ...]] = {"lora_A.weight": (r, module.columns), "lora_B.weight": (module.rows, r)}
    expected |= {"lora_magnitude_vector": (module.rows,)} if config.get("use_dora") else {}
    _check_shapes(folder, module.name, tensors, expected)
    a, b = tensors["lora_A.weight"], tensors["lora_B.weight"]
    magnitude = tensors.get("lora_magnitude_vector")
    return {
        piece.native: Adapter(a, b[piece.rows], scale, None if magnitude is None else magnitude[piece.rows])
        for piece in module.pieces
    }


def _check_shapes(
    folder: Path, name: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ModelError unless the `tensors` of the adapter of `name` have the `expected` shapes."""
    shapes = {ending: tuple(tensor.shape) for ending, tensor in tensors.items()}
    if shapes != expected:
        raise ModelError(
            f"{folder / WEIGHTS}: {name!r} has the shapes {shapes}, but the model and {CONFIG} imply "
            f"{expected}; the files belong to different models"
        )


def _rank_and_scale(folder: Path, config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return the rank of the adapter of `name`, a module or parameter, and the factor of its product."""
    r = _number(folder, config, "r", "rank_pattern", name)
    alpha = _number(folder, config, "lora_alpha", "alpha_pattern", name)
    return r, alpha / (sqrt(r) if config.get("use_rslora") else r)


def _number(folder: Path, config: Mapping[str, Any], key: str, pattern: str, module: str) -> Any:
    """Return the value of `key` for `module`: that of the first suffix in `pattern` that matches, else the default."""
    value: Any = config.get(key)
    for name, override in (config.get(pattern) or {}).items():
        if not re.fullmatch(r"[\w.]+", name):
            raise ModelError(
                f"{folder / CONFIG}: {pattern} has the regular expression {brief(name)}, and kumi reads "
                f"module names only; list them"
            )
        if module == name or module.endswith(f".{name}"):
            value = override
            break
    if not _has_type(value, _READ[key]) or not 0 < value <= _MAX or (key == "r" and int(value) != value):
        raise ModelError(
            f"{folder / CONFIG}: {key}={brief(value)} of {module} must be a positive number of at most "
            f"{_MAX:.0f}; correct it"
        )
    return value


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types or object in types)


def initial_adapter_params(adapters: Mapping[str, Adapter], spec: ModelSpec, folder: Path) -> dict[str, Tensor]:
    """Return the adapter parameters of `spec`, by name, initialized from `adapters`, which were read from `folder`.

    Fused adapters (see `write_adapter`) are split into those of the single matrices. Raise ModelError unless rank,
    scale, DoRA and the adapted matrices agree with `spec`.
    """
    lora, result = spec.lora, dict[str, Tensor]()
    assert lora is not None, "spec.lora is None: the model has no adapters to initialize"
    factors = {op.name: factor_names(op) for op in ops(spec) if has_adapter(lora, op)}
    targets = list(factors)
    # An adapter whose B is zero changes nothing, so `spec` need not adapt its matrix.
    adapted = {name: adapter for name, adapter in adapters.items() if bool(adapter.b.any()) or name in targets}
    other = sorted(set(targets) ^ set(adapted))
    if other:
        raise ModelError(
            f"lora.source: {folder} and lora.target_modules disagree about {other[0]} and "
            f"{len(other) - 1} more; set lora.target_modules to the modules that the adapters have"
        )
    groups = {name: group for group in _fused_groups(spec, targets) for name in group}
    for name in targets:
        adapter = adapted[name]
        if name in groups:
            adapter = _split(adapter, groups[name].index(name), len(groups[name]), lora.r)
        rank, dora = adapter.b.shape[-1], adapter.magnitude is not None
        if rank != lora.r or dora != lora.use_dora or abs(adapter.scale - lora.scale) > 1e-9 * lora.scale:
            raise ModelError(
                f"lora.source: {name} in {folder} has rank {rank}, scale {adapter.scale:g}"
                f"{' and DoRA' if dora else ''}, but [lora] has rank {lora.r}, scale {lora.scale:g}"
                f"{' and DoRA' if lora.use_dora else ''}; change [lora] to match"
            )
        result |= dict(zip(factors[name], (adapter.a, adapter.b), strict=True))
        if adapter.magnitude is not None:
            result[f"{name}.lora_magnitude_vector"] = adapter.magnitude
    return result


def _fused_groups(spec: ModelSpec, names: list[str]) -> list[list[str]]:
    """Return, for each Hugging Face module, the native matrices among `names` that it fuses."""
    return [[piece.native for piece in module.pieces if piece.native in names] for module in modules(spec).values()]


def _split(adapter: Adapter, place: int, count: int, r: int) -> Adapter:
    """Return the adapter of matrix number `place` out of a fused `adapter` of `count` matrices with rank `r` each.

    An adapter that is not block-structured is returned unchanged: all its ranks act on the matrix.
    """
    ranks = slice(place * r, (place + 1) * r)
    if (
        adapter.a.shape[0] != count * r
        or bool(adapter.b[:, : ranks.start].any())
        or bool(adapter.b[:, ranks.stop :].any())
    ):
        return adapter
    return replace(adapter, a=adapter.a[ranks].clone(), b=adapter.b[:, ranks].clone())


def adapters_reader(folder: Path, spec: ModelSpec) -> Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]:
    """Return a function `read("model/<parameter>", start, shape)` that reads a slice of an adapter parameter of `spec`.

    Raise ModelError unless `folder` has adapters that fit `spec`.
    """
    if not (folder / CONFIG).exists():
        raise ModelError(f"lora.source: {shown_path(folder)} has no {CONFIG}; name a folder of PEFT adapters")
    base = replace(spec, lora=None)
    full = read_full_modules(folder, base)
    expected = {tensor.native for tensor in full_tensors(spec).values()}
    if full.keys() != expected:
        names = ", ".join(sorted(full.keys() ^ expected))
        raise ModelError(
            f"lora.source: {folder} and lora.modules_to_save disagree about {names}; set lora.modules_to_save to the "
            f"modules that were trained in full, {sorted(full)}"
        )
    parameters = initial_adapter_params(read_adapters(folder, base), spec, folder) | full

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        block = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        return parameters[name.removeprefix("model/")][block]

    return read
