"""Writing a Hugging Face model folder, a tensor at a time, so that it is there whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.convert import hf_stream, stream
from kumi.convert.carried import PROCESSOR_FILES, grouped, write_spans
from kumi.convert.safetensors_file import Layout, create, lay_out, put, sync
from kumi.convert.safetensors_read import Span
from kumi.convert.stream import Reader
from kumi.errors import ModelError, RefusedError
from kumi.files.output import copy_into, refuse_link, remove_tree
from kumi.files.untrusted import read_object
from kumi.spec import families
from kumi.spec.ledger import buffers, params
from kumi.spec.ledger import tensors as tensors_of
from kumi.spec.model import ModelSpec
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part, parts
from kumi.storage.folders import free_space_check

if TYPE_CHECKING:
    from torch import Tensor

# Files that go with a tokenizer, copied as they are.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "tiktoken.model",
    *PROCESSOR_FILES,
)

# Of every tensor its shape, and the parts of it that files hold.
_Wanted = Mapping[str, tuple[tuple[int, ...], tuple[Part, ...]]]

# What is written besides the weights (configs, card, headers) stays below this many bytes, tokenizer files apart.
_SLACK = 2**20


def write(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Iterator[tuple[str, Tensor]] | Reader,
    *,
    base_config: Mapping[str, Any] | None,
    dtype: str | Mapping[str, str],
    tokenizer_folder: str | Path | None,
    card: str,
    generation_config: Mapping[str, Any] | None = None,
    carried: Mapping[str, Span] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    replace: bool = False,
) -> None:
    """Write the model folder `folder`, as transformers would save it; at most one tensor is held at a time.

    `tensors` gives every tensor of `spec` once, in any order, or reads any part of one; `dtype` is what they are stored
    in, by name, or one for all parameters. Files hold the parts of a tensor that `kumi.spec.weights` says; `carried`
    are copied as they are.
    `base_config` is changed only where it does not describe `spec`. RefusedError when `folder` is there and not empty
    (unless `replace`) or the disk is too small, before anything is written; ModelError for a tensor that is missing,
    unknown or of a wrong shape. Nothing is left behind then.
    """
    folder = Path(folder)
    dtypes = {tensor.name: dtype for tensor in params(spec)} if isinstance(dtype, str) else dict(dtype)
    if isinstance(dtype, str):
        dtypes |= {tensor.name: "float32" for tensor in buffers(spec)}
    wanted = {tensor.name: (tensor.shape, parts(spec, tensor)) for tensor in tensors_of(spec)}
    tails = grouped(carried or {}, max_shard_bytes)
    shards, names = _shards(wanted, dtypes, max_shard_bytes, len(tails))
    beside = dict(zip(names, tails, strict=True))
    check_target(folder, replace=replace)
    carried_bytes = sum(span.nbytes for span in (carried or {}).values())
    free_space_check(folder, sum(layout.size for layout in shards.values()) + carried_bytes + _SLACK, "the model")
    config = _with_dtype(families.patched(base_config, spec) if base_config else families.to_hf(spec), dtypes)
    config.pop("quantization_config", None)  # what is written here never is
    part = unfinished(folder)
    remove_tree(part)
    part.mkdir(parents=True)
    try:
        for file, layout in shards.items():
            create(part / file, layout)
        if isinstance(tensors, Reader):
            stream.run(hf_stream.jobs(part, shards, spec, tensors), str(folder))
        else:
            _write_tensors(part, shards, wanted, tensors)
        for name, spans in beside.items():
            write_spans(part / name, spans)
        _write_index(part, shards, beside)
        _write_json(part / "config.json", config)
        _write_json(part / "generation_config.json", generation_config or _generation(config, tokenizer_folder))
        (part / "README.md").write_text(card, encoding="utf-8")
        _copy_tokenizer(tokenizer_folder, part)
        _publish(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _shards(wanted: _Wanted, dtypes: Mapping[str, str], limit: int, more: int) -> tuple[dict[str, Layout], list[str]]:
    """The files to write and what goes where: as few as `limit` bytes a file allow, the last parameters last. And the
    names of `more` files after them."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    stored = {part.name: (part.shape, dtypes[name]) for name, (_, kept) in wanted.items() for part in kept}
    for name, (shape, dtype) in stored.items():
        bytes_ = prod(shape) * ITEMSIZE[dtype]
        if groups[-1] and size + bytes_ > limit:
            groups.append({})
            size = 0
        groups[-1][name] = shape
        size += bytes_
    count = len(groups) + more
    names = [f"model-{index:05d}-of-{count:05d}.safetensors" for index in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    layouts = {name: lay_out(group, {key: stored[key][1] for key in group}) for name, group in zip(names, groups)}
    return layouts, names[len(groups) :]


def _write_tensors(
    part: Path, shards: Mapping[str, Layout], wanted: _Wanted, tensors: Iterator[tuple[str, Tensor]]
) -> None:
    place = {name: file for file, layout in shards.items() for name in layout.shapes}
    waiting = dict(wanted)
    for name, tensor in tensors:
        if name not in waiting:
            again = "came twice" if name in wanted else "is not a parameter of this model"
            raise ModelError(f"{part}: {name!r} {again}; nothing was written")
        shape, kept = waiting.pop(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{part}: {name!r} is {tuple(tensor.shape)}, {shape} in the model; nothing was written")
        for piece in kept:
            data = tensor[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.extent))]
            put(part / place[piece.name], shards[place[piece.name]], piece, data)
    if waiting:
        raise ModelError(f"{part}: {next(iter(waiting))!r} and {len(waiting) - 1} more never came; nothing was written")


def _write_index(part: Path, shards: Mapping[str, Layout], beside: Mapping[str, Mapping[str, Span]]) -> None:
    """Where there are several files, which tensor is in which."""
    if len(shards) + len(beside) == 1:
        return
    place = {name: file for file, layout in shards.items() for name in layout.shapes}
    place |= {name: file for file, spans in beside.items() for name in spans}
    total = sum(layout.size - len(layout.header) for layout in shards.values())
    total += sum(span.nbytes for spans in beside.values() for span in spans.values())
    _write_json(part / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": place})


def unfinished(folder: Path) -> Path:
    """Where `folder` is put together; a name that nobody else gives a folder, since a leftover of it is removed."""
    absolute = folder.absolute()
    return absolute.with_name(f".{absolute.name}.kumi-part")


def check_target(folder: Path, *, replace: bool) -> None:
    """Raise RefusedError when `folder` is a link, or is there, not empty, and not to be replaced."""
    refuse_link(folder)
    if folder.exists() and not replace and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusedError(f"{folder}: exists and is not empty; name another folder, or delete it")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir():
        raise RefusedError(f"{folder}: cannot be made, for {above} is a file; name another folder")


def _with_dtype(config: dict[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """`config` with the dtype of most of the bytes, under the key that it has already."""
    names = list(dtypes.values())
    key = "dtype" if "dtype" in config else "torch_dtype"
    return config | {key: max(sorted(set(names)), key=names.count)}


def read_generation(folder: Path) -> dict[str, Any] | None:
    """The generation_config.json of `folder`, None where it has none."""
    name = "generation_config.json"
    return read_object(folder, name, infinity=True) if (folder / name).exists() else None


def _generation(config: Mapping[str, Any], tokenizer: str | Path | None) -> dict[str, Any]:
    """The settings that stand beside the tokenizer, whose tokens they name; else the ids that `config` has."""
    given = None if tokenizer is None else read_generation(Path(tokenizer))
    if given is not None:
        return given
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"_from_model_config": True} | {key: config[key] for key in keys if config.get(key) is not None}


def _copy_tokenizer(source: str | Path | None, part: Path) -> None:
    """Copy the tokenizer's files from the folder `source`, and code that `auto_map` may name; kumi runs none of it."""
    if source is None:
        return
    code = sorted(path.name for path in Path(source).glob("*.py"))
    for name in (*TOKENIZER_FILES, *code):
        if (Path(source) / name).exists():
            copy_into(part, Path(source), name)


def _publish(part: Path, folder: Path) -> None:
    """Put everything on the disk, and only then give it its name."""
    for file in part.iterdir():
        sync(file)
    sync(part)
    if folder.exists():
        shutil.rmtree(folder)
    part.rename(folder)
    sync(folder.absolute().parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
