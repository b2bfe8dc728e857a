"""LoRA and DoRA adapters in PEFT's format: which Hugging Face modules can have them, and writing an adapter folder.

    adapter_config.json          r, lora_alpha, target_modules, ...
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight (r, in), .lora_B.weight (out, r),
                                 .lora_magnitude_vector (out,)

`kumi.convert.hf.expert_adapters` has the tensors of routed experts, `kumi.convert.hf.full_modules` those of modules
that are trained in full.

A Hugging Face module may fuse k native matrices (such as q, k and v). Their adapters are fused, too: the A's are
stacked, and B is block-structured, with zeros outside each matrix's own rows and columns. The fused adapter computes
the same function with rank k * r; alpha is multiplied such that the scale is unchanged.
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
from kumi.convert.files.safetensors_write import sync
from kumi.convert.hf import expert_adapters, full_modules
from kumi.convert.hf.card import evaluation_section, fact_table
from kumi.convert.hf.card_text import folder_title
from kumi.convert.hf.write_folder import check_target, staging_folder
from kumi.files.output import remove_tree
from kumi.safe_output import inline_markdown
from kumi.spec.adapters import factor_names, has_adapter
from kumi.spec.ledger import ops
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec
from kumi.spec.peft import module_name
from kumi.spec.weights import Part, stored_tensors

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

# PEFT's defaults for the keys of adapter_config.json that kumi never sets otherwise.
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
    "peft_type": "LORA",
    "revision": None,
    "trainable_token_indices": None,
}


@dataclass(frozen=True)
class NativeMatrix:
    """One native matrix of a Hugging Face module.

    native   its name, without ".weight"
    rows     (out,) indices of its rows in the module's matrix
    """

    native: str
    rows: Tensor


@dataclass(frozen=True)
class Module:
    """A Hugging Face module with a matrix (rows, columns), made from one or more native matrices, `pieces`.

    `transposed`: files store the matrix as (columns, rows), as GPT-2's Conv1D does.
    """

    name: str
    rows: int
    columns: int
    transposed: bool
    pieces: tuple[NativeMatrix, ...]


@lru_cache(maxsize=8)
def modules(spec: ModelSpec) -> Mapping[str, Module]:
    """Return the modules of a model of `spec` that can have adapters, by Hugging Face name."""
    base = replace(spec, lora=None)
    adaptable = {f"{op.name}.weight": op.name for op in ops(base) if op.kind == "linear" and not op.experts}
    result = {}
    for name, pieces in stored_tensors(base).items():
        if not all(piece.param.name in adaptable for piece in pieces):
            continue
        module = module_name(spec, name)
        shape, transposed = pieces[0].part.shape, pieces[0].part.order == (1, 0)
        rows, columns = shape[::-1] if transposed else shape
        matrices = tuple(NativeMatrix(adaptable[piece.param.name], _rows(piece.part)) for piece in pieces)
        result[module] = Module(module, rows, columns, transposed, matrices)
    return result


def _rows(part: Part) -> Tensor:
    """Return the rows (out,) of the file's matrix that hold a native matrix, in native order."""
    if part.order == (1, 0):
        return torch.arange(part.at[1], part.at[1] + part.size[1])
    view = torch.arange(prod(part.view[:-1])).view(part.view[:-1])
    block = tuple(slice(first, first + size) for first, size in zip(part.at[:-1], part.size[:-1]))
    return view[block].permute(part.order[:-1]).reshape(-1)


def write_adapter(
    folder: Path,
    spec: ModelSpec,
    read: Callable[[str], Tensor],
    *,
    base: str | None,
    card: str = "",
    replace: bool = False,
) -> None:
    """Write the adapters of `spec` into `folder`, in PEFT's format.

    `read` returns a parameter, in float32, by native name. `base` is the base model that the configuration names: a
    folder, or a hub id with its revision. Raise RefusedError when `folder` exists and is not empty, unless `replace`.
    """
    assert spec.lora is not None, "spec.lora is None: the model has no adapters to write"
    check_target(folder, replace=replace)
    tensors, multiples = {}, {}
    adapted = {op.name: factor_names(op) for op in ops(spec) if has_adapter(spec.lora, op)}
    experts = [matrix for name, matrix in expert_adapters.expert_matrices(spec).items() if name in adapted]
    for path, matrix in expert_adapters.matrices_by_path(experts).items():
        a, b = (read(name).float() for name in adapted[matrix.native])
        for ending, tensor in matrix.peft_tensors(a, b).items():
            tensors[f"{PREFIX}{path}.{ending}"] = tensor.contiguous()
    for stored, part in full_modules.full_tensors(spec).items():
        tensors[f"{PREFIX}{stored}"] = read(part.native).float().view(part.shape).clone()
    for module in modules(spec).values():
        matrices = [matrix for matrix in module.pieces if matrix.native in adapted]
        if matrices:
            multiples[module.name] = len(matrices)
            for ending, tensor in _fuse(module, matrices, spec.lora, read).items():
                tensors[f"{PREFIX}{module.name}.{ending}"] = tensor
    staging = staging_folder(folder)
    remove_tree(staging)
    staging.mkdir(parents=True)
    try:
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        config = _config(spec, multiples, [matrix.parameter for matrix in experts], base)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (staging / CONFIG).write_text(text, encoding="utf-8")
        if card:
            (staging / "README.md").write_text(card, encoding="utf-8")
        for file in staging.iterdir():
            sync(file)
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _fuse(module: Module, matrices: list[NativeMatrix], lora: Lora, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Return the adapter tensors of `module`, fused from those of its native `matrices`, by PEFT's endings."""
    r = lora.r
    b = torch.zeros(module.rows, r * len(matrices))
    for index, matrix in enumerate(matrices):
        b[matrix.rows, index * r : (index + 1) * r] = read(f"{matrix.native}.lora_B.weight").float()
    a = [read(f"{matrix.native}.lora_A.weight").float() for matrix in matrices]
    result = {"lora_A.weight": torch.cat(a), "lora_B.weight": b}
    if lora.use_dora:
        magnitude = torch.empty(module.rows)
        for matrix in matrices:
            magnitude[matrix.rows] = read(f"{matrix.native}.lora_magnitude_vector").float()
        result["lora_magnitude_vector"] = magnitude
    return result


def _config(
    spec: ModelSpec, module_multiples: Mapping[str, int], experts: list[str], base: str | None
) -> dict[str, Any]:
    """Return adapter_config.json.

    `module_multiples` maps each adapted module to its rank as a multiple of `spec.lora.r`. `experts` are the adapted
    parameters of routed experts, whose rank is `spec.lora.r`.
    """
    lora = spec.lora
    assert lora is not None
    name, revision = hub.split(base or "") or (base, None)
    multiples = {**module_multiples, **dict.fromkeys(experts, 1)}
    common = max(sorted(set(multiples.values())), key=list(multiples.values()).count)
    exceptions = {name: multiple for name, multiple in multiples.items() if multiple != common}
    transposed = {modules(spec)[name].transposed for name in module_multiples}
    return _DEFAULTS | {
        "base_model_name_or_path": name,
        "revision": revision,
        "r": lora.r * common,
        "lora_alpha": _alpha(lora, common),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "fan_in_fan_out": transposed == {True},
        "target_modules": _targets(spec, list(module_multiples)),
        "task_type": "SEQ_CLS" if spec.head == "score" else "CAUSAL_LM",
        "modules_to_save": full_modules.target_names(spec) or None,
        "target_parameters": expert_adapters.target_parameters(spec, experts) or None,
        "rank_pattern": {name: lora.r * multiple for name, multiple in exceptions.items()},
        "alpha_pattern": {name: _alpha(lora, multiple) for name, multiple in exceptions.items()},
    }


def _alpha(lora: Lora, multiple: int) -> float:
    """Return the alpha that keeps the adapter's scale when the rank is multiplied by `multiple`."""
    alpha = lora.alpha * (sqrt(multiple) if lora.use_rslora else multiple)
    return int(alpha) if float(alpha).is_integer() else alpha


def _targets(spec: ModelSpec, names: list[str]) -> list[str]:
    """Return PEFT's target_modules for the modules `names`.

    A module is named by its last component where that selects none but `names`, else by its full name.
    """
    by_leaf: dict[str, set[str]] = {}
    for file in stored_tensors(replace(spec, lora=None)):
        name = module_name(spec, file)
        by_leaf.setdefault(_leaf(name), set()).add(name)
    targets = []
    for name in names:
        targets.append(_leaf(name) if by_leaf[_leaf(name)] <= set(names) else name)
    return sorted(set(targets))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def adapter_card(*, name: str, base: str, lora: Lora, facts: Mapping[str, str], evaluation: str = "") -> str:
    """Return the README.md of an adapter folder, with `facts` as rows of a table, in their order.

    `base` is the base model: a hub id, or a folder. For a folder, the card has its title (`folder_title`) instead of
    its path. `evaluation` is the Markdown of a section.
    """
    kind = "DoRA" if lora.use_dora else "LoRA"
    summary = {"kind": kind, "rank": str(lora.r), "scale": f"{lora.scale:g}", "matrices": ", ".join(lora.targets)}
    summary |= {"trained in full": ", ".join(lora.modules)} if lora.modules else {}
    published = hub.split(base)  # a local folder is not a model on the hub
    base_keys = {} if published is None else {"base_model": published[0], "base_model_relation": "adapter"}
    header = {"library_name": "peft", **base_keys, "tags": ["kumi", "lora"]}
    base_name = base if published is not None else folder_title(Path(base))
    return "\n".join(
        [
            "---",
            *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()),
            "---",
            "",
            f"# {inline_markdown(name)}",
            "",
            f"{kind} adapters of {inline_markdown(base_name)}, written by kumi {kumi.__version__}.",
            "",
            *fact_table(summary | dict(facts)),
            "",
            *evaluation_section(evaluation),
        ]
    )
