"""Merge adapters into their base model, one tensor at a time, in float32.

    W' = W + s B A,    and with DoRA    W' = m / |W + s B A| * (W + s B A)  by rows

rounded once, to the dtype of W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kumi import hub
from kumi.convert import kumi_checkpoint
from kumi.convert.base_digest import base_digest
from kumi.convert.files.slices import Dims
from kumi.convert.files.stream import Reader, Runs
from kumi.convert.hf import adapter_read
from kumi.convert.hf.adapter_read import Adapter
from kumi.convert.hf.publish import model_folder_of
from kumi.convert.open_model import Source, adapters_of_run, open_source
from kumi.convert.verify import sample_prompts
from kumi.errors import ConfigError, ModelError
from kumi.nn.decoder import Decoder
from kumi.nn.dtypes import wide
from kumi.nn.linear import Linear
from kumi.nn.lora import LoraLinear
from kumi.paths import looked_for
from kumi.spec.adapters import has_adapter
from kumi.spec.ledger import ops, tensors
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec

# Allowed difference between the float32 logits of a merged model and of its base with unmerged adapters, relative to
# the standard deviation of the logits; by the dtype of the merged weights.
_TOLERANCE = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class AdaptedModel:
    """A base model and its unmerged adapters, by the native names of their matrices (without ".weight")."""

    folder: Path
    base: Source
    adapters: Mapping[str, Adapter]


def _base_model(config: Mapping[str, Any]) -> str | None:
    """Return the base model in PEFT's configuration: a folder, or a hub id with its revision."""
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{name}@{revision}" if isinstance(name, str) and revision and hub.is_id(name) else name


def open_unmerged(folder: Path, base: str | None = None) -> AdaptedModel:
    """Open the adapters in `folder`, and their base model: `base`, or else the model that the adapters name."""
    trained = adapters_of_run(folder)
    if trained is None:
        base_name = _base_model(adapter_read.read_config(folder)) if base is None else base
    else:
        base_name = trained.checkpoint.meta["base"] if base is None else base
    if not base_name:
        raise ConfigError(f"{folder}: its adapters name no base model; name it with --base FOLDER")
    path = model_folder_of(base_name, "--base")
    if not path.is_dir():
        raise ConfigError(
            f"{folder}: its base model {looked_for(str(base_name))} is not a folder here; name its folder with "
            f"--base FOLDER"
        )
    source = open_source(path)
    if trained is None:
        return AdaptedModel(folder, source, adapter_read.read_adapters(folder, source.spec))
    if (path / "config.json").exists() and base_digest(path) != trained.checkpoint.meta["base_digest"]:
        raise ConfigError(
            f"{folder}: its adapters were trained on another model than the one in {path}; restore that model, or "
            f"name its folder with --base FOLDER"
        )
    return AdaptedModel(folder, source, _adapters_in_checkpoint(trained, source.spec))


def _adapters_in_checkpoint(saved: kumi_checkpoint.SavedModel, spec: ModelSpec) -> dict[str, Adapter]:
    """Read the adapters from a run's checkpoint."""
    lora = Lora(**saved.checkpoint.meta["lora"] | {"targets": tuple(saved.checkpoint.meta["lora"]["targets"])})
    result, read, adapted = {}, saved.checkpoint.read, replace(spec, lora=lora)
    kumi_checkpoint.check_tensors(saved, adapted)
    for op in ops(adapted):
        if has_adapter(lora, op):
            a, b = (read(f"model/{op.name}.lora_{matrix}.weight").float() for matrix in "AB")
            magnitude = read(f"model/{op.name}.lora_magnitude_vector").float() if lora.use_dora else None
            result[op.name] = Adapter(a, b, lora.scale, magnitude)
    return result


def open_merged(folder: Path, base: str | None = None) -> Source:
    """Return the base model with the adapters in `folder` merged into it while it is read.

    The base model is `base`, or else the model that the adapters name.
    """
    model = open_unmerged(folder, base)
    return replace(model.base, folder=folder, reader=_merging_reader(model.base, model.adapters))


def _merging_reader(source: Source, adapters: Mapping[str, Adapter]) -> Reader:
    """Return a reader of `source` that merges the adapters into the matrices that it reads."""
    shapes = {param.name: param.shape for param in tensors(source.spec)}

    def read_into(name: str, start: Dims, out: Tensor) -> None:
        adapter = adapters.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if adapter is None:
            source.reader.read_into(name, start, out)
            return
        rows = torch.empty(out.shape[0], shapes[name][1], dtype=out.dtype)
        source.reader.read_into(name, (start[0], 0), rows)
        out.copy_(merge_rows(rows, adapter, start[0])[:, start[1] : start[1] + out.shape[1]])

    def runs(name: str) -> Runs | None:
        return None if name.removesuffix(".weight") in adapters else source.reader.runs(name)

    return Reader(source.reader.dtypes, read_into, source.reader.cut, runs)


def merge_rows(rows: Tensor, adapter: Adapter, first: int = 0) -> Tensor:
    """Return `rows` (N, in) of a matrix, beginning at row `first`, with `adapter` merged, in float32 or wider."""
    block = slice(first, first + rows.shape[0])
    dtype = wide(rows.dtype)
    result = torch.addmm(rows.to(dtype), adapter.b[block].to(dtype), adapter.a.to(dtype), alpha=adapter.scale)
    if adapter.magnitude is not None:
        result *= (adapter.magnitude[block].to(dtype) / torch.linalg.vector_norm(result, dim=1))[:, None]
    return result


def check_merged(folder: Path, base: str | None, written: Source) -> float:
    """Return the largest difference between the float32 logits of `written` and of the base with unmerged adapters.

    `written` is a copy of `open_merged(folder, base)`. Raise ModelError if the difference exceeds `_TOLERANCE`.
    """
    with torch.no_grad():
        prompts = sample_prompts(written.spec.vocab_size, min(16, written.spec.max_position_embeddings))
        # The first model is freed before the second is loaded.
        expected = unmerged_decoder(open_unmerged(folder, base))(prompts)
        actual = written.decoder().eval()(prompts)
    difference = float((expected - actual).abs().max())
    names = [name for name in written.dtypes if name.endswith("_proj.weight")]
    allowed = max(_TOLERANCE[written.dtypes[name]] for name in names or written.dtypes) * float(expected.std())
    if not difference <= allowed:
        raise ModelError(
            f"{written.folder}: its logits differ by {difference:.3g} from those of the base with unmerged adapters, "
            f"more than the allowed {allowed:.3g}, because the adapters are too large for the dtype of the base; "
            f"write it in float32 with --dtype, or do not merge"
        )
    return difference


@torch.no_grad()
def unmerged_decoder(model: AdaptedModel) -> Decoder:
    """Return the model in float32, with the adapters as separate modules."""
    decoder = model.base.decoder().eval()
    modules = dict(decoder.named_modules())
    for name, adapter in model.adapters.items():
        linear = modules[name]
        assert isinstance(linear, Linear), f"{name} is a {type(linear).__name__}"
        lora = Lora(adapter.a.shape[0], adapter.scale * adapter.a.shape[0], use_dora=adapter.magnitude is not None)
        replacement = LoraLinear(linear, lora, name, dtype=torch.float32)
        replacement.lora_A.weight.copy_(adapter.a)
        replacement.lora_B.weight.copy_(adapter.b)
        if adapter.magnitude is not None and replacement.lora_magnitude_vector is not None:
            replacement.lora_magnitude_vector.copy_(adapter.magnitude)
        path, _, leaf = name.rpartition(".")
        setattr(modules[path], leaf, replacement.eval())
    return decoder
