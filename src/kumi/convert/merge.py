"""Merge adapters into their base model, one tensor at a time, in float32.

    W' = W + s B A,    and with DoRA    W' = m / |W + s B A| * (W + s B A)  by rows

rounded once, to the dtype of W. W is the base model's matrix (out, in), B (out, r) and A (r, in) are the adapter's
factors, s is its scale, and m (out,) has DoRA's magnitudes.
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
from kumi.nn.expert_lora import LoraExperts
from kumi.nn.linear import Linear
from kumi.nn.lora import LoraLinear
from kumi.nn.moe import Experts
from kumi.paths import shown_path
from kumi.remote.addresses import is_url
from kumi.spec import families
from kumi.spec.adapters import factor_names, has_adapter, is_adapter
from kumi.spec.ledger import HEADS, ops, tensors, trained_names
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec

# Allowed difference between the float32 logits of a merged model and of its base with unmerged adapters, relative to
# the standard deviation of the logits; by the dtype of the merged weights.
_TOLERANCE = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class AdaptedModel:
    """A base model and its unmerged adapters, by the native names of their matrices (without ".weight").

    The matrices of routed experts are one tensor, whose adapter has an A and a B for each expert. `full`: tensors that
    were trained in full, and replace those of the base model, by native name.
    """

    folder: Path
    base: Source
    adapters: Mapping[str, Adapter]
    full: Mapping[str, Tensor]


def _base_model(config: Mapping[str, Any]) -> str | None:
    """Return the base model in PEFT's configuration: a folder, or a hub id with its revision."""
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{name}@{revision}" if isinstance(name, str) and revision and hub.is_id(name) else name


def open_unmerged(folder: Path, base: str | None = None, *, critic: bool = False) -> AdaptedModel:
    """Open the adapters in `folder`, and their base model: `base`, or else the model that the adapters name.

    `critic`: the adapters of a run's critic. Raise ConfigError if the base model is not named, not a folder here, or
    not the model that the adapters were trained on.
    """
    saved = adapters_of_run(folder, critic=critic)
    if saved is None:
        base_name = _base_model(adapter_read.read_config(folder)) if base is None else base
    else:
        base_name = saved.checkpoint.meta["base"] if base is None else base
    if not base_name:
        raise ConfigError(f"{folder}: its adapters name no base model; name it with --base FOLDER")
    if base is None and is_url(base_name):
        # A file from anyone must not choose where requests with the user's credentials go.
        raise ConfigError(f"{folder}: its adapters name the URL {base_name} as their base model; name it with --base")
    path = model_folder_of(base_name, "--base")
    if not path.is_dir():
        raise ConfigError(
            f"{folder}: its base model {shown_path(str(base_name))} is not a folder here; name its folder with "
            f"--base FOLDER"
        )
    source = open_source(path)
    has_score_head = (
        adapter_read.has_score_head(folder) if saved is None else families.from_hf(saved.config).head == "score"
    )
    if has_score_head and source.spec.head == "lm":
        source = _with_score_head(source)
    if saved is None:
        adapters = adapter_read.read_adapters(folder, source.spec)
        return AdaptedModel(folder, source, adapters, adapter_read.read_full_modules(folder, source.spec))
    if (path / "config.json").exists() and base_digest(path) != saved.checkpoint.meta["base_digest"]:
        raise ConfigError(
            f"{folder}: its adapters were trained on another model than the one in {path}; restore that model, or "
            f"name its folder with --base FOLDER"
        )
    return AdaptedModel(folder, source, *_adapters_in_checkpoint(saved, source.spec))


def _with_score_head(source: Source) -> Source:
    """Return the language model `source` as a reward model with zeros as its head, in the dtype of the final norm."""
    config, head, reader = families.with_score_head(source.config), HEADS["score"], source.reader
    spec = families.from_hf(config)

    def read_into(name: str, start: Dims, out: Tensor) -> None:
        if name == head:
            out.zero_()
        else:
            reader.read_into(name, start, out)

    dtypes = {**reader.dtypes, head: reader.dtypes["model.norm.weight"]}
    # The head is in no file, so it has neither byte ranges nor blocks of rows to respect.
    with_head = Reader(
        {tensor.name: dtypes[tensor.name] for tensor in tensors(spec)},
        read_into,
        lambda name, row: 1 if name == head else reader.block_end(name, row),
        lambda name: None if name == head else reader.runs(name),
        reader.file_run,
    )
    return replace(source, spec=spec, config=config, reader=with_head)


def _adapters_in_checkpoint(
    saved: kumi_checkpoint.SavedModel, spec: ModelSpec
) -> tuple[dict[str, Adapter], dict[str, Tensor]]:
    """Read the adapters, and the tensors that were trained in full, from a run's checkpoint."""
    lora = lora_settings(saved.checkpoint.meta)
    result, read, adapted = {}, saved.checkpoint.read, replace(spec, lora=lora)
    kumi_checkpoint.check_tensors(saved, adapted)
    for op in ops(adapted):
        if has_adapter(lora, op):
            a, b = (read(f"model/{name}").float() for name in factor_names(op))
            magnitude = read(f"model/{op.name}.lora_magnitude_vector").float() if lora.use_dora else None
            result[op.name] = Adapter(a, b, lora.scale, magnitude)
    full = [name for name in trained_names(adapted) if not is_adapter(name)]
    return result, {name: read(f"model/{name}").float() for name in full}


def lora_settings(meta: Mapping[str, Any]) -> Lora:
    """Return the settings of the adapters in a run's checkpoint, from its `meta`."""
    settings = meta["lora"]
    # Checkpoints of earlier versions have no `modules`.
    names = {"targets": tuple(settings["targets"]), "modules": tuple(settings.get("modules", ()))}
    return Lora(**settings | names)


def open_merged(folder: Path, base: str | None = None, *, critic: bool = False) -> Source:
    """Return the base model with the adapters in `folder` merged into it while it is read.

    The base model is `base`, or else the model that the adapters name. `critic`: the adapters of a run's critic.
    """
    model = open_unmerged(folder, base, critic=critic)
    return replace(model.base, folder=folder, reader=_merging_reader(model.base, model.adapters, model.full))


def _merging_reader(source: Source, adapters: Mapping[str, Adapter], full: Mapping[str, Tensor]) -> Reader:
    """Return a reader of `source` that merges the adapters into the matrices that it reads.

    Tensors that are in `full` are taken from there.
    """
    shapes = {param.name: param.shape for param in tensors(source.spec)}

    def read_into(name: str, start: Dims, out: Tensor) -> None:
        adapter = adapters.get(name.removesuffix(".weight"))
        if name in full:
            out.copy_(full[name][tuple(slice(first, first + size) for first, size in zip(start, out.shape))])
            return
        if adapter is None:
            source.reader.read_into(name, start, out)
            return
        if len(start) == 3:
            _merge_experts(name, start, out, adapter)
            return
        rows = torch.empty(out.shape[0], shapes[name][1], dtype=out.dtype)
        source.reader.read_into(name, (start[0], 0), rows)
        out.copy_(merge_rows(rows, adapter, start[0])[:, start[1] : start[1] + out.shape[1]])

    def _merge_experts(name: str, start: Dims, out: Tensor, adapter: Adapter) -> None:
        source.reader.read_into(name, start, out)
        rows, columns = (slice(first, first + size) for first, size in zip(start[1:], out.shape[1:], strict=True))
        for expert, matrix in enumerate(out, start[0]):
            part = replace(adapter, a=adapter.a[expert, columns].T, b=adapter.b[expert, rows])
            matrix.copy_(merge_rows(matrix, part))

    def runs(name: str) -> Runs | None:
        # The bytes in the files are those of the unmerged matrix.
        changed = name in full or name.removesuffix(".weight") in adapters
        return None if changed else source.reader.runs(name)

    return Reader(source.reader.dtypes, read_into, source.reader.block_end, runs)


def merge_rows(rows: Tensor, adapter: Adapter, first: int = 0) -> Tensor:
    """Return `rows` (N, in) of a matrix, beginning at row `first`, with `adapter` merged, in float32 or wider."""
    block = slice(first, first + rows.shape[0])
    dtype = wide(rows.dtype)
    result = torch.addmm(rows.to(dtype), adapter.b[block].to(dtype), adapter.a.to(dtype), alpha=adapter.scale)
    if adapter.magnitude is not None:
        result *= (adapter.magnitude[block].to(dtype) / torch.linalg.vector_norm(result, dim=1))[:, None]
    return result


def check_merged(folder: Path, base: str | None, written: Source, *, critic: bool = False) -> float:
    """Return the largest difference between the float32 logits of `written` and of the base with unmerged adapters.

    `written` is a copy of `open_merged(folder, base, critic)`. Raise ModelError if the difference exceeds `_TOLERANCE`.
    """
    with torch.no_grad():
        prompts = sample_prompts(written.spec.vocab_size, min(16, written.spec.max_position_embeddings))
        # The first model is freed before the second is loaded.
        expected = unmerged_decoder(open_unmerged(folder, base, critic=critic))(prompts)
        actual = written.decoder().eval()(prompts)
    difference = float((expected - actual).abs().max())
    names = [name for name in written.dtypes if name.endswith("_proj.weight")]
    allowed = max(_TOLERANCE[written.dtypes[name]] for name in names or written.dtypes) * float(expected.std())
    if not difference <= allowed:
        raise ModelError(
            f"{written.folder}: its logits differ by {difference:.3g} from those of the base with unmerged adapters, "
            f"more than the allowed {allowed:.3g}, because the dtype of the base is too coarse for the adapters' "
            f"values; write the merged model in float32 with --dtype, or do not merge"
        )
    return difference


def check_adapters(folder: Path, written: Path, base: str | None = None, *, critic: bool = False) -> float:
    """Return the largest difference between the float32 logits with the adapters in `folder` and those in `written`.

    Both have the base model `base`, or else that of `folder`. `critic`: the adapters are those of a run's critic. Raise
    ModelError if the difference is larger than rounding.
    """
    source = open_unmerged(folder, base, critic=critic)
    spec, place = source.base.spec, str(source.base.folder)
    prompts = sample_prompts(spec.vocab_size, min(16, spec.max_position_embeddings))
    with torch.no_grad():
        expected = unmerged_decoder(source)(prompts)
        actual = unmerged_decoder(open_unmerged(written, place))(prompts)
    difference, allowed = float((expected - actual).abs().max()), _TOLERANCE["float32"] * float(expected.std())
    if not difference <= allowed:
        raise ModelError(
            f"{written}: its logits differ by {difference:.3g} from those of the adapters in {folder}, more than the "
            f"allowed {allowed:.3g}; please report this"
        )
    return difference


@torch.no_grad()
def unmerged_decoder(model: AdaptedModel, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return the model in `dtype`, with the adapters as separate modules."""
    decoder = model.base.decoder(dtype).eval()
    for name, tensor in model.full.items():
        decoder.get_parameter(name).copy_(tensor)
    modules = dict(decoder.named_modules())
    of_experts: dict[str, dict[str, Adapter]] = {}
    for name, adapter in model.adapters.items():
        path, _, leaf = name.rpartition(".")
        if isinstance(modules[path], Experts):
            of_experts.setdefault(path, {})[leaf] = adapter
            continue
        linear = modules[name]
        assert isinstance(linear, Linear), f"{name} is a {type(linear).__name__}"
        replacement = LoraLinear(linear, _settings(adapter), name, dtype=dtype)
        replacement.lora_A.weight.copy_(adapter.a)
        replacement.lora_B.weight.copy_(adapter.b)
        if adapter.magnitude is not None and replacement.lora_magnitude_vector is not None:
            replacement.lora_magnitude_vector.copy_(adapter.magnitude)
        setattr(modules[path], leaf, replacement.eval())
    for name, adapters in of_experts.items():
        experts, (path, _, leaf) = modules[name], name.rpartition(".")
        assert isinstance(experts, Experts)
        loras = {matrix: _settings(adapter) for matrix, adapter in adapters.items()}
        adapted = LoraExperts(experts, loras, dtype=dtype)
        for matrix, adapter in adapters.items():
            adapted.get_parameter(f"{matrix}_lora_A").copy_(adapter.a)
            adapted.get_parameter(f"{matrix}_lora_B").copy_(adapter.b)
        setattr(modules[path], leaf, adapted.eval())
    return decoder


def _settings(adapter: Adapter) -> Lora:
    """Return LoRA settings with the rank and the scale of `adapter`, and DoRA if it has magnitudes."""
    r = adapter.b.shape[-1]
    return Lora(r, adapter.scale * r, use_dora=adapter.magnitude is not None)
