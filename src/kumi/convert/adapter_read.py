"""Adapters in the format of PEFT, read strictly: whatever is not understood is refused, for it would be left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from kumi.convert.adapter import CONFIG, PREFIX, WEIGHTS, Module, modules
from kumi.convert.entry import entry_of, read_entry
from kumi.convert.safetensors_read import read_header
from kumi.errors import ModelError
from kumi.files.untrusted import brief, inside, read_object
from kumi.paths import looked_for
from kumi.spec.adapters import takes
from kumi.spec.ledger import ops
from kumi.spec.model import ModelSpec

# Keys of the configuration that say nothing about what the adapters compute.
_BESIDE = (
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
# Keys that are read, with the types of their values.
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
    "fan_in_fan_out": (bool,),
}
_WORDS: dict[type, str] = {str: "a text", int: "a number", bool: "true or false", dict: "a table"}
# A rank is at most a matrix's width; alpha is published up to 512.
_MOST = 1e6
# Other ways to begin take something out of the base's own weights.
_INITS = (True, False, "gaussian", "orthogonal", None)
_ENDINGS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@dataclass(frozen=True)
class Adapter:
    """What stands beside a native matrix (out, in): `a` (r, in) and `b` (out, r), multiplied by `scale`, and DoRA's
    `magnitude` (out,)."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of the adapters in `folder`, once it is sure that all it says is understood."""
    path = folder / CONFIG
    found = read_object(folder, CONFIG)
    if found.get("peft_type") != "LORA":
        raise ModelError(
            f"{path}: peft_type is {brief(found.get('peft_type'))}; kumi reads adapters of LoRA and DoRA, 'LORA'"
        )
    known = (*_BESIDE, *_READ)
    for key, value in found.items():
        if value is not None and not _has_type(value, _READ.get(key, (object,))):
            raise ModelError(f"{path}: {key}={brief(value)} must be {_WORDS[_READ[key][0]]}; fetch the file again")
        empty = value is None or value is False or value in ({}, [], "", 0)
        if key not in known and not empty:
            raise ModelError(
                f"{path}: {key[:60]}={brief(value)} is beyond what kumi knows of LoRA; merge with peft instead"
            )
    if found.get("init_lora_weights", True) not in _INITS:
        raise ModelError(
            f"{path}: init_lora_weights={brief(found['init_lora_weights'])} moves a part of the base's weights into "
            f"the adapters; save them with peft's path_initial_model_for_weight_conversion first"
        )
    if found.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias={brief(found['bias'])}: kumi reads adapters with bias 'none' only")
    return found


def read_adapters(folder: Path, spec: ModelSpec) -> dict[str, Adapter]:
    """The adapters in `folder` by the native names of the matrices they stand beside (without ".weight"), in float32.

    ModelError where they are not adapters of a model of `spec`.
    """
    config = read_config(folder)
    if not (folder / WEIGHTS).exists():
        raise ModelError(f"{folder}: has no {WEIGHTS}; kumi opens no pickled adapters: save them with peft anew")
    known, found = modules(spec), dict[str, dict[str, Tensor]]()
    for name, span in read_header(inside(folder, WEIGHTS)).items():
        ending = next((one for one in _ENDINGS if name.endswith(f".{one}")), "")
        module = name.removeprefix(PREFIX).removesuffix(f".{ending}")
        if not ending or not name.startswith(PREFIX) or module not in known:
            raise ModelError(
                f"{folder / WEIGHTS}: {name!r} is no adapter of a matrix in the layers of this "
                f"{spec.family} model; kumi would drop it, so merge with peft instead"
            )
        found.setdefault(module, {})[ending] = read_entry(entry_of(span)).float()
    if not found:
        raise ModelError(f"{folder / WEIGHTS}: holds no adapters; fetch the file again")
    result: dict[str, Adapter] = {}
    for name, tensors in found.items():
        result |= _natives(folder, config, known[name], tensors)
    return result


def _natives(
    folder: Path, config: Mapping[str, Any], module: Module, tensors: Mapping[str, Tensor]
) -> dict[str, Adapter]:
    """The adapter of `module`, as those of its pieces."""
    dora = bool(config.get("use_dora"))
    r = _number(folder, config, "r", "rank_pattern", module.name)
    alpha = _number(folder, config, "lora_alpha", "alpha_pattern", module.name)
    wanted: dict[str, tuple[int, ...]] = {"lora_A.weight": (r, module.columns), "lora_B.weight": (module.rows, r)}
    wanted |= {"lora_magnitude_vector": (module.rows,)} if dora else {}
    shapes = {ending: tuple(tensor.shape) for ending, tensor in tensors.items()}
    if shapes != wanted:
        raise ModelError(
            f"{folder / WEIGHTS}: {module.name!r} has {shapes}, its model and {CONFIG} say {wanted}; the "
            f"files belong to different models"
        )
    scale = alpha / (sqrt(r) if config.get("use_rslora") else r)
    a, b = tensors["lora_A.weight"], tensors["lora_B.weight"]
    magnitude = tensors.get("lora_magnitude_vector")
    return {
        piece.native: Adapter(a, b[piece.rows], scale, None if magnitude is None else magnitude[piece.rows])
        for piece in module.pieces
    }


def _number(folder: Path, config: Mapping[str, Any], key: str, pattern: str, module: str) -> Any:
    """What the configuration says of `module`: the entry of `pattern` whose name ends its own, else `key`."""
    found: Any = config.get(key)
    for name, value in (config.get(pattern) or {}).items():
        if not re.fullmatch(r"[\w.]+", name):
            raise ModelError(f"{folder / CONFIG}: {pattern} has the expression {brief(name)}; kumi reads names only")
        if module == name or module.endswith(f".{name}"):
            found = value
            break
    if not _has_type(found, _READ[key]) or not 0 < found <= _MOST or (key == "r" and int(found) != found):
        raise ModelError(
            f"{folder / CONFIG}: {key}={brief(found)} of {module} is no positive number of at most "
            f"{_MOST:.0f}; correct it"
        )
    return found


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types or object in types)


def as_trained(adapters: Mapping[str, Adapter], spec: ModelSpec, folder: Path) -> dict[str, Tensor]:
    """The parameters of the adapters of `spec`, by name, to go on from `adapters`, which `folder` has.

    What `write_adapter` has joined is taken apart. ModelError where rank, scale, DoRA or the matrices that have
    adapters are not those of `spec`.
    """
    lora, found = spec.lora, dict[str, Tensor]()
    assert lora is not None, "only a model with adapters goes on from some"
    wanted = [op.name for op in ops(spec) if takes(lora, op)]
    held = {name: one for name, one in adapters.items() if bool(one.b.any()) or name in wanted}
    other = sorted(set(wanted) ^ set(held))
    if other:
        raise ModelError(
            f"lora.source: {folder} and lora.target_modules disagree about {other[0]} and "
            f"{len(other) - 1} more; name the modules that the adapters have"
        )
    joined = {name: own for own in _joined(spec, wanted) for name in own}
    for name in wanted:
        one = _apart(held[name], joined[name].index(name), len(joined[name]), lora.r)
        rank, dora = one.a.shape[0], one.magnitude is not None
        if rank != lora.r or dora != lora.use_dora or abs(one.scale - lora.scale) > 1e-9 * lora.scale:
            raise ModelError(
                f"lora.source: {name} in {folder} has rank {rank}, scale {one.scale:g}{' and DoRA' if dora else ''}, "
                f"and [lora] says {lora.r}, {lora.scale:g}{' and DoRA' if lora.use_dora else ''}; set them alike"
            )
        found |= {f"{name}.lora_A.weight": one.a, f"{name}.lora_B.weight": one.b}
        if one.magnitude is not None:
            found[f"{name}.lora_magnitude_vector"] = one.magnitude
    return found


def _joined(spec: ModelSpec, wanted: list[str]) -> list[list[str]]:
    """Those of the matrices `wanted` that are one in files, together."""
    return [[piece.native for piece in one.pieces if piece.native in wanted] for one in modules(spec).values()]


def _apart(one: Adapter, place: int, count: int, r: int) -> Adapter:
    """`one` without the ranks of other matrices, where its module's adapter is made of `count` and it is number
    `place`: their columns of B are zero."""
    own = slice(place * r, (place + 1) * r)
    if one.a.shape[0] != count * r or bool(one.b[:, : own.start].any()) or bool(one.b[:, own.stop :].any()):
        return one
    return replace(one, a=one.a[own].clone(), b=one.b[:, own].clone())


def adapters_reader(folder: Path, spec: ModelSpec) -> Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]:
    """A function that reads one part of an adapter's parameter, `read("model/<parameter>", start, shape)`: those of
    `spec`, to go on from the adapters in `folder`."""
    if not (folder / CONFIG).exists():
        raise ModelError(
            f"lora.source: {looked_for(folder)} has no {CONFIG}; name a folder of adapters as PEFT writes them"
        )
    found = as_trained(read_adapters(folder, replace(spec, lora=None)), spec, folder)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        part = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        return found[name.removeprefix("model/")][part]

    return read
