"""Hugging Face model folders: reading them strictly, and the one place to write them from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kumi.convert.card import model_card
from kumi.convert.hf_write import write
from kumi.errors import ModelError
from kumi.spec.ledger import params
from kumi.spec.model import ModelSpec

__all__ = ["Entry", "check", "entries", "model_card", "read", "read_tensors", "write"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TIED_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

# safetensors' names of the dtypes that weights may have, and torch's.
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its file, shape and dtype (torch's name). Its data are read when asked for."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def entries(folder: str | Path) -> dict[str, Entry]:
    """Every tensor of the safetensors file or files in `folder`, by name; nothing but headers is read."""
    found: dict[str, Entry] = {}
    for file in _files(Path(folder)):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                part = tensors.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise ModelError(f"{file}: {name!r} has dtype {part.get_dtype()}; kumi reads {', '.join(DTYPES)}: "
                                     f"export the model without quantisation")  # fmt: skip
                found[name] = Entry(file, name, tuple(part.get_shape()), dtype)
    return found


def read(entry: Entry, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
    """The tensor of `entry`, or its part of `shape` from the indices `start` on."""
    with _opened(entry.file) as tensors:
        if start is None or shape is None or shape == entry.shape:
            whole: Tensor = tensors.get_tensor(entry.name)
            return whole
        part: Tensor = tensors.get_slice(entry.name)[tuple(slice(a, a + n) for a, n in zip(start, shape))]
        return part


def read_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in `folder`, one at a time, with its name."""
    for name, entry in entries(folder).items():
        yield name, read(entry)


def check(folder: str | Path, spec: ModelSpec) -> dict[str, Entry]:
    """The entry of every parameter of `spec`, once it is sure that `folder` holds exactly these.

    ModelError for a tensor that is missing, unknown or of another shape. Accepted besides: the rotary tables that old
    versions of transformers saved, and a copy of the tied embedding.
    """
    found = check_headers(folder, spec)
    head = found.get(TIED_HEAD)
    if spec.tie_word_embeddings and head is not None and not read(head).equal(read(found[EMBEDDING])):
        raise ModelError(f"{head.file}: {TIED_HEAD!r} differs from {EMBEDDING!r}, but config.json ties them; "
                         f"set tie_word_embeddings to false")  # fmt: skip
    return {param.name: found[param.name] for param in params(spec)}


def check_headers(folder: str | Path, spec: ModelSpec) -> dict[str, Entry]:
    """Every entry of `folder`, once it is sure that their names and shapes are those of `spec`; no tensor is read."""
    found, wanted = entries(folder), {param.name: param.shape for param in params(spec)}
    for name, shape in wanted.items():
        if name not in found:
            raise ModelError(f"{folder}: {name!r} is missing from the weights; {_missing_hint(name, found)}")
        if found[name].shape != shape:
            raise ModelError(f"{folder}: {name!r} is {found[name].shape} in {found[name].file.name}, {shape} in the "
                             f"model of config.json; the two files belong to different models")  # fmt: skip
    for name in found.keys() - wanted.keys():
        if name.endswith(".rotary_emb.inv_freq"):
            continue
        if name != TIED_HEAD or not spec.tie_word_embeddings:
            raise ModelError(f"{found[name].file}: {name!r} {found[name].shape} has no place in the {spec.family} "
                             f"model of this config.json; kumi would drop it")  # fmt: skip
        if found[name].shape != wanted[EMBEDDING]:
            raise ModelError(f"{found[name].file}: {name!r} differs from {EMBEDDING!r}, but config.json ties them; "
                             f"set tie_word_embeddings to false")  # fmt: skip
    return found


def _missing_hint(name: str, found: Mapping[str, Entry]) -> str:
    if name == TIED_HEAD:
        return "a model whose head is its embedding has tie_word_embeddings: true"
    bare = name.removeprefix("model.")
    return (
        f"it has {bare!r}: save the causal language model, not its base" if bare in found else "fetch the model again"
    )


def _files(folder: Path) -> list[Path]:
    """The weight files of `folder`, named by the index where there is one."""
    index = folder / INDEX
    if index.exists():
        files = sorted({folder / str(file) for file in _weight_map(index).values()})
    elif (folder / SINGLE).exists():
        files = [folder / SINGLE]
    elif any(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"{folder}: the weights are pickled (.bin), which kumi does not open; use transformers: "
                         f"AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)")  # fmt: skip
    else:
        raise ModelError(f"{folder}: there is neither {SINGLE} nor {INDEX}; a model folder has one of them")
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ModelError(f"{folder}: {', '.join(missing)} named by {INDEX} is missing; fetch the model again")
    return files


def _weight_map(index: Path) -> dict[str, Any]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: not a weight index ({error!r}); fetch the file again") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is empty or no object; fetch the file again")
    return weight_map


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({error}); fetch the file again") from None
