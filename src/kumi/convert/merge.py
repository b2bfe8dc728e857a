"""A model with the adapters of a PEFT folder in it: merged, tensor by tensor, in float32.

    W' = W + s B A,    and with DoRA    W' = m / |W + s B A| * (W + s B A)  by rows

rounded once, to the dtype that W has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kumi import hub
from kumi.convert import adapter_read, native
from kumi.convert.adapter_read import Adapter
from kumi.convert.base import digest
from kumi.convert.publish import located
from kumi.convert.rectangles import Dims
from kumi.convert.source import Source, adapters_of_run, open_source
from kumi.convert.stream import Reader, Runs
from kumi.convert.verify import sample_prompts
from kumi.errors import ConfigError, ModelError
from kumi.nn.decoder import Decoder
from kumi.nn.dtypes import wide
from kumi.nn.linear import Linear
from kumi.nn.lora import LoraLinear
from kumi.paths import looked_for
from kumi.spec.adapters import takes
from kumi.spec.ledger import ops, tensors
from kumi.spec.lora import Lora
from kumi.spec.model import ModelSpec

# Largest share of the logits' own spread by which a merged model may differ from its base with the adapters beside it,
# both computed in float32, by the dtype that the merged weights are rounded to.
TOLERANCE = {"float64": 1e-5, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class Beside:
    """A model, and the adapters that stand beside its matrices, by the native names of these (without ".weight")."""

    folder: Path
    base: Source
    adapters: Mapping[str, Adapter]


def _named(config: Mapping[str, Any]) -> str | None:
    """The base model of PEFT's configuration: a folder, or a hub id with its revision."""
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{name}@{revision}" if isinstance(name, str) and revision and hub.is_id(name) else name


def open_beside(folder: Path, base: str | None = None) -> Beside:
    """The adapters in `folder` and their model: `base`, by default the one that they name."""
    saved = adapters_of_run(folder)
    if saved is None:
        named = _named(adapter_read.read_config(folder)) if base is None else base
    else:
        named = saved.checkpoint.meta["base"] if base is None else base
    if not named:
        raise ConfigError(f"{folder}: its adapter_config.json names no base model; say which one with --base FOLDER")
    path = located(named, "--base")
    if not path.is_dir():
        raise ConfigError(
            f"{folder}: its base model {looked_for(str(named))} is no folder here; say where it is with --base FOLDER"
        )
    source = open_source(path)
    if saved is None:
        return Beside(folder, source, adapter_read.read_adapters(folder, source.spec))
    if (path / "config.json").exists() and digest(path) != saved.checkpoint.meta["base_digest"]:
        raise ConfigError(
            f"{folder}: holds adapters of another model than {path} holds now; restore it, or name it "
            f"with --base FOLDER"
        )
    return Beside(folder, source, _trained(saved, source.spec))


def _trained(saved: native.SavedModel, spec: ModelSpec) -> dict[str, Adapter]:
    """The adapters in a checkpoint of a run."""
    lora = Lora(**saved.checkpoint.meta["lora"] | {"targets": tuple(saved.checkpoint.meta["lora"]["targets"])})
    found, read, adapted = {}, saved.checkpoint.read, replace(spec, lora=lora)
    native.check(saved, adapted)
    for op in ops(adapted):
        if takes(lora, op):
            a, b = (read(f"model/{op.name}.lora_{which}.weight").float() for which in "AB")
            magnitude = read(f"model/{op.name}.lora_magnitude_vector").float() if lora.use_dora else None
            found[op.name] = Adapter(a, b, lora.scale, magnitude)
    return found


def open_merged(folder: Path, base: str | None = None) -> Source:
    """The model `base`, by default the one that the adapters in `folder` name, with these in it."""
    found = open_beside(folder, base)
    return replace(found.base, folder=folder, reader=_reader(found.base, found.adapters))


def _reader(source: Source, adapters: Mapping[str, Adapter]) -> Reader:
    shapes = {param.name: param.shape for param in tensors(source.spec)}

    def read_into(name: str, start: Dims, out: Tensor) -> None:
        one = adapters.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if one is None:
            source.reader.read_into(name, start, out)
            return
        rows = torch.empty(out.shape[0], shapes[name][1], dtype=out.dtype)
        source.reader.read_into(name, (start[0], 0), rows)
        out.copy_(merged(rows, one, start[0])[:, start[1] : start[1] + out.shape[1]])

    def runs(name: str) -> Runs | None:
        return None if name.removesuffix(".weight") in adapters else source.reader.runs(name)

    return Reader(source.reader.dtypes, read_into, source.reader.cut, runs)


def merged(rows: Tensor, one: Adapter, first: int = 0) -> Tensor:
    """The `rows` (N, in) of a matrix, from number `first` on, with their adapter, in float32 or wider."""
    own = slice(first, first + rows.shape[0])
    dtype = wide(rows.dtype)
    found = torch.addmm(rows.to(dtype), one.b[own].to(dtype), one.a.to(dtype), alpha=one.scale)
    if one.magnitude is not None:
        found *= (one.magnitude[own].to(dtype) / torch.linalg.vector_norm(found, dim=1))[:, None]
    return found


def check_merged(folder: Path, base: str | None, written: Source) -> float:
    """The largest difference between the logits of `written`, which `open_merged` was written to, and those of the base
    with the adapters of `folder` beside its matrices, in float32; ModelError where it is too large."""
    with torch.no_grad():
        prompts = sample_prompts(written.spec.vocab_size, min(16, written.spec.max_position_embeddings))
        # One model in memory at a time.
        wanted = decoder_of(open_beside(folder, base))(prompts)
        found = written.decoder().eval()(prompts)
    difference = float((wanted - found).abs().max())
    names = [name for name in written.dtypes if name.endswith("_proj.weight")]
    allowed = max(TOLERANCE[written.dtypes[name]] for name in names or written.dtypes) * float(wanted.std())
    if not difference <= allowed:
        raise ModelError(
            f"{written.folder}: its logits differ by {difference:.3g} from those of the base with the adapters beside "
            f"it, more than {allowed:.3g}; the adapters are too large for the dtype of the base: write it in float32 "
            f"with --dtype, or keep them apart"
        )
    return difference


@torch.no_grad()
def decoder_of(found: Beside) -> Decoder:
    """The model in float32, with the adapters as modules of their own."""
    decoder = found.base.decoder().eval()
    there = dict(decoder.named_modules())
    for name, one in found.adapters.items():
        old = there[name]
        assert isinstance(old, Linear), f"{name} is a {type(old).__name__}"
        lora = Lora(one.a.shape[0], one.scale * one.a.shape[0], use_dora=one.magnitude is not None)
        made = LoraLinear(old, lora, name, dtype=torch.float32)
        made.lora_A.weight.copy_(one.a)
        made.lora_B.weight.copy_(one.b)
        if one.magnitude is not None and made.lora_magnitude_vector is not None:
            made.lora_magnitude_vector.copy_(one.magnitude)
        path, _, leaf = name.rpartition(".")
        setattr(there[path], leaf, made.eval())
    return decoder
