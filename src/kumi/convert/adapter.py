"""Adapters in the format of PEFT: which modules of Hugging Face have them, and writing a folder of them.

    adapter_config.json          r, lora_alpha, target_modules, ...
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight (r, in), .lora_B.weight (out, r),
                                 .lora_magnitude_vector (out,)

Where files hold several native matrices as one, their adapters become one: A's stand one below the other, and each B
has its own rows and columns of a B that is zero elsewhere. That is the same function, of a rank k times as large; with
an alpha that grows likewise the scale stays.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod, sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import kumi
from kumi import hub
from kumi.convert.hf_write import check_target, unfinished
from kumi.convert.safetensors_file import sync
from kumi.files.output import remove_tree
from kumi.spec.adapters import takes
from kumi.spec.ledger import ops
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec
from kumi.spec.peft import module_name
from kumi.spec.weights import Part, files

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

# Keys of PEFT's LoRA configuration that are written as they are there by default.
_DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "auto_mapping": None,
    "bias": "none",
    "exclude_modules": None,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "revision": None,
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
}


@dataclass(frozen=True)
class Piece:
    """A native matrix, by its name without ".weight", and the rows (out,) of the module's matrix that it is."""

    native: str
    rows: Tensor


@dataclass(frozen=True)
class Module:
    """A module of Hugging Face whose matrix has `rows` rows and `columns` columns, made of `pieces`; it is stored the
    other way round where it is `transposed`."""

    name: str
    rows: int
    columns: int
    transposed: bool
    pieces: tuple[Piece, ...]


@lru_cache(maxsize=8)
def modules(spec: ModelSpec) -> Mapping[str, Module]:
    """The modules that can have adapters in a model of `spec`, by name."""
    base = replace(spec, lora=None)
    can = {f"{op.name}.weight": op.name for op in ops(base) if op.kind == "linear" and not op.experts}
    found = {}
    for name, pieces in files(base).items():
        if not all(piece.param.name in can for piece in pieces):
            continue
        module = module_name(spec, name)
        shape, turned = pieces[0].part.shape, pieces[0].part.order == (1, 0)
        rows, columns = shape[::-1] if turned else shape
        parts = tuple(Piece(can[piece.param.name], _rows(piece.part)) for piece in pieces)
        found[module] = Module(module, rows, columns, turned, parts)
    return found


def _rows(part: Part) -> Tensor:
    """The rows of a matrix in a file that a native matrix has, in its order."""
    if part.order == (1, 0):
        return torch.arange(part.at[1], part.at[1] + part.size[1])
    view = torch.arange(prod(part.view[:-1])).view(part.view[:-1])
    places = tuple(slice(first, first + size) for first, size in zip(part.at[:-1], part.size[:-1]))
    return view[places].permute(part.order[:-1]).reshape(-1)


def write_adapter(
    folder: Path,
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    *,
    base: str | None,
    card: str = "",
    tokenizer: Path | None = None,
    replace: bool = False,
) -> None:
    """Write `folder`, the adapters of `spec`, whose tensors `read` gives by their native names, in float32.

    `base` is what the configuration says of the model that they belong to: a folder, or a hub id with its revision.
    RefusedError when `folder` is there and not empty (unless `replace`).
    """
    assert spec.lora is not None, "only a model with adapters has any to write"
    check_target(folder, replace=replace)
    tensors, ranks = {}, {}
    adapted = {op.name for op in ops(spec) if takes(spec.lora, op)}
    for module in modules(spec).values():
        own = [piece for piece in module.pieces if piece.native in adapted]
        if own:
            ranks[module.name] = len(own)
            for ending, tensor in _joined(module, own, spec.lora, read).items():
                tensors[f"{PREFIX}{module.name}.{ending}"] = tensor
    part = unfinished(folder)
    remove_tree(part)
    part.mkdir(parents=True)
    try:
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(_config(spec, ranks, base), indent=2, sort_keys=True) + "\n"
        (part / CONFIG).write_text(text, encoding="utf-8")
        if card:
            (part / "README.md").write_text(card, encoding="utf-8")
        for file in part.iterdir():
            sync(file)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _joined(module: Module, own: list[Piece], lora: Lora, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The adapters of the pieces `own` of `module`, as one."""
    r = lora.r
    b = torch.zeros(module.rows, r * len(own))
    for number, piece in enumerate(own):
        b[piece.rows, number * r : (number + 1) * r] = read(f"{piece.native}.lora_B.weight").float()
    a = [read(f"{piece.native}.lora_A.weight").float() for piece in own]
    found = {"lora_A.weight": torch.cat(a), "lora_B.weight": b}
    if lora.use_dora:
        magnitude = torch.empty(module.rows)
        for piece in own:
            magnitude[piece.rows] = read(f"{piece.native}.lora_magnitude_vector").float()
        found["lora_magnitude_vector"] = magnitude
    return found


def _config(spec: ModelSpec, ranks: Mapping[str, int], base: str | None) -> dict[str, Any]:
    """adapter_config.json, of modules whose rank is so many times that of `spec.lora`."""
    lora = spec.lora
    assert lora is not None
    name, revision = hub.split(base or "") or (base, None)
    usual = max(sorted(set(ranks.values())), key=list(ranks.values()).count)
    odd = {name: times for name, times in ranks.items() if times != usual}
    turned = {modules(spec)[name].transposed for name in ranks}
    return _DEFAULTS | {
        "base_model_name_or_path": name,
        "revision": revision,
        "r": lora.r * usual,
        "lora_alpha": _alpha(lora, usual),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "fan_in_fan_out": turned == {True},
        "target_modules": _targets(spec, list(ranks)),
        "rank_pattern": {name: lora.r * times for name, times in odd.items()},
        "alpha_pattern": {name: _alpha(lora, times) for name, times in odd.items()},
    }


def _alpha(lora: Lora, times: int) -> float:
    """The alpha with which a rank so many times as large has the same scale."""
    alpha = lora.alpha * (sqrt(times) if lora.use_rslora else times)
    return int(alpha) if float(alpha).is_integer() else alpha


def _targets(spec: ModelSpec, names: list[str]) -> list[str]:
    """`names` as PEFT finds modules: by the ends of names where all that end so are meant, else by whole names."""
    every: dict[str, set[str]] = {}
    for file in files(replace(spec, lora=None)):
        name = module_name(spec, file)
        every.setdefault(_leaf(name), set()).add(name)
    found = []
    for name in names:
        found.append(_leaf(name) if every[_leaf(name)] <= set(names) else name)
    return sorted(set(found))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def adapter_card(*, name: str, base: str, lora: Lora, facts: Mapping[str, str]) -> str:
    """The README.md of a folder of adapters. `facts` become a table, in their order."""
    kind = "DoRA" if lora.use_dora else "LoRA"
    shape = {"kind": kind, "rank": str(lora.r), "scale": f"{lora.scale:g}", "matrices": ", ".join(lora.targets)}
    rows = [f"| {key} | {value} |" for key, value in (shape | dict(facts)).items()]
    published = hub.split(base)  # a folder here is no model there
    above = {} if published is None else {"base_model": published[0], "base_model_relation": "adapter"}
    header = {"library_name": "peft", **above, "tags": ["kumi", "lora"]}
    return "\n".join(
        [
            "---",
            *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()),
            "---",
            "",
            f"# {name}",
            "",
            f"{kind} adapters of {base}, written by kumi {kumi.__version__}.",
            "",
            "| | |",
            "|---|---|",
            *rows,
            "",
        ]
    )
