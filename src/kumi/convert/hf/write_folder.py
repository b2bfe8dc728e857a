"""Write a Hugging Face model folder one tensor at a time and publish it atomically: completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.convert.files import stream
from kumi.convert.files.safetensors_read import Span
from kumi.convert.files.safetensors_write import Layout, create, lay_out, put, sync
from kumi.convert.files.stream import Reader
from kumi.convert.hf import weight_files
from kumi.convert.hf.padding import padding_token, write_padding_token
from kumi.convert.hf.passthrough import PROCESSOR_FILES, split_by_size, write_spans
from kumi.errors import ModelError, RefusedError
from kumi.files.output import copy_into, refuse_link, remove_tree
from kumi.files.untrusted import read_object
from kumi.spec import families
from kumi.spec.ledger import buffers, params
from kumi.spec.ledger import tensors as tensors_of
from kumi.spec.model import ModelSpec
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part, stored_parts
from kumi.storage.folders import check_free_space

if TYPE_CHECKING:
    from torch import Tensor

# Files of a tokenizer, copied unchanged.
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

# Each native tensor's shape, and its parts in the files, by name.
_Expected = Mapping[str, tuple[tuple[int, ...], tuple[Part, ...]]]

# Upper bound on the bytes of configs, card and headers; tokenizer files not included.
_SLACK = 2**20


def write_hf_folder(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Iterator[tuple[str, Tensor]] | Reader,
    *,
    base_config: Mapping[str, Any] | None,
    dtype: str | Mapping[str, str],
    tokenizer_folder: str | Path | None,
    card: str,
    generation_config: Mapping[str, Any] | None = None,
    passthrough: Mapping[str, Span] | None = None,
    max_shard_bytes: int = 5 * 10**9,
    replace: bool = False,
) -> None:
    """Write the model folder `folder` in the layout of transformers' save_pretrained, one tensor in memory at a time.

    tensors            every tensor of `spec` once, in any order; or a reader of slices
    base_config        config.json to start from, changed only where it disagrees with `spec`
    dtype              dtypes by name, or one for all parameters
    tokenizer_folder   source of tokenizer files, copied unchanged but for a reward model's padding token
    card               content of README.md
    generation_config  by default that of `tokenizer_folder`, or else the token ids of config.json
    passthrough        passthrough tensors, copied unchanged

    Names and parts of tensors follow `kumi.spec.weights`. Raise RefusedError, before writing, when `folder` exists and
    is not empty (unless `replace`) or the disk is too small; ModelError for a tensor that is missing, unknown or of a
    wrong shape. On any error nothing is left behind.
    """
    folder = Path(folder)
    dtypes = {tensor.name: dtype for tensor in params(spec)} if isinstance(dtype, str) else dict(dtype)
    if isinstance(dtype, str):
        dtypes |= {tensor.name: "float32" for tensor in buffers(spec)}
    expected = {tensor.name: (tensor.shape, stored_parts(spec, tensor)) for tensor in tensors_of(spec)}
    passthrough = passthrough or {}
    passthrough_groups = split_by_size(passthrough, max_shard_bytes)
    shards, names = _shards(expected, dtypes, max_shard_bytes, len(passthrough_groups))
    passthrough_files = dict(zip(names, passthrough_groups, strict=True))
    check_target(folder, replace=replace)
    passthrough_bytes = sum(span.nbytes for span in passthrough.values())
    check_free_space(folder, sum(layout.size for layout in shards.values()) + passthrough_bytes + _SLACK, "the model")
    config = _with_dtype(families.patch_config(base_config, spec) if base_config else families.to_hf(spec), dtypes)
    config.pop("quantization_config", None)  # kumi writes weights unquantized
    padding = padding_token(config, tokenizer_folder) if spec.head == "score" else None
    config = config if padding is None else config | {"pad_token_id": padding[0]}
    staging = staging_folder(folder)
    remove_tree(staging)
    staging.mkdir(parents=True)
    try:
        for file, layout in shards.items():
            create(staging / file, layout)
        if isinstance(tensors, Reader):
            stream.run(weight_files.jobs(staging, shards, spec, tensors), str(folder))
        else:
            _write_tensors(staging, shards, expected, tensors)
        for name, spans in passthrough_files.items():
            write_spans(staging / name, spans)
        _write_index(staging, shards, passthrough_files)
        _write_json(staging / "config.json", config)
        _write_json(staging / "generation_config.json", generation_config or _generation(config, tokenizer_folder))
        (staging / "README.md").write_text(card, encoding="utf-8")
        _copy_tokenizer(tokenizer_folder, staging)
        if padding is not None and padding[1]:
            write_padding_token(staging, padding[1])
        _publish(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _shards(
    expected: _Expected, dtypes: Mapping[str, str], limit: int, more: int
) -> tuple[dict[str, Layout], list[str]]:
    """Distribute the tensors over as few files of at most `limit` bytes as possible, in order.

    Return the layout of each file by name, and the names of `more` further files.
    """
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    stored = {
        part.name: (part.shape, dtypes[name]) for name, (_, tensor_parts) in expected.items() for part in tensor_parts
    }
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
    staging: Path, shards: Mapping[str, Layout], expected: _Expected, tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write each tensor's parts into their files; raise ModelError unless `tensors` are exactly the expected ones."""
    file_of = {name: file for file, layout in shards.items() for name in layout.shapes}
    remaining = dict(expected)
    for name, tensor in tensors:
        if name not in remaining:
            problem = "was given twice" if name in expected else "is not a parameter of this model"
            raise ModelError(f"{staging}: {name!r} {problem}; nothing was written")
        shape, tensor_parts = remaining.pop(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{staging}: {name!r} is {tuple(tensor.shape)}, but {shape} in the model; nothing was written"
            )
        for piece in tensor_parts:
            data = tensor[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.extent))]
            put(staging / file_of[piece.name], shards[file_of[piece.name]], piece, data)
    if remaining:
        raise ModelError(
            f"{staging}: {next(iter(remaining))!r} and {len(remaining) - 1} more tensors were not given; nothing was "
            f"written"
        )


def _write_index(
    staging: Path, shards: Mapping[str, Layout], passthrough_files: Mapping[str, Mapping[str, Span]]
) -> None:
    """Write model.safetensors.index.json, unless there is only one file."""
    if len(shards) + len(passthrough_files) == 1:
        return
    file_of = {name: file for file, layout in shards.items() for name in layout.shapes}
    file_of |= {name: file for file, spans in passthrough_files.items() for name in spans}
    total = sum(layout.size - len(layout.header) for layout in shards.values())
    total += sum(span.nbytes for spans in passthrough_files.values() for span in spans.values())
    _write_json(staging / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": file_of})


def staging_folder(folder: Path) -> Path:
    """Return the staging folder for `folder`.

    Its name is kumi's own: a leftover staging folder of that name is deleted.
    """
    absolute = folder.absolute()
    return absolute.with_name(f".{absolute.name}.kumi-part")


def check_target(folder: Path, *, replace: bool) -> None:
    """Raise RefusedError if `folder` is a link, or exists, is not empty and not to be replaced."""
    refuse_link(folder)
    if folder.exists() and not replace and (not folder.is_dir() or any(folder.iterdir())):
        raise RefusedError(f"{folder}: exists and is not empty; name another folder, or delete it")
    parent_folder = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent_folder.is_dir():
        raise RefusedError(f"{folder}: cannot be created, because {parent_folder} is a file; name another folder")


def _with_dtype(config: dict[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Return `config` with the most frequent of `dtypes` under its key dtype, or else torch_dtype."""
    names = list(dtypes.values())
    key = "dtype" if "dtype" in config else "torch_dtype"
    return config | {key: max(sorted(set(names)), key=names.count)}


def read_generation(folder: Path) -> dict[str, Any] | None:
    """Return generation_config.json of `folder`; None if there is none."""
    name = "generation_config.json"
    return read_object(folder, name, infinity=True) if (folder / name).exists() else None


def _generation(config: Mapping[str, Any], tokenizer: str | Path | None) -> dict[str, Any]:
    """Return the generation settings from the tokenizer's folder, else the token ids of `config`."""
    settings = None if tokenizer is None else read_generation(Path(tokenizer))
    if settings is not None:
        return settings
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"_from_model_config": True} | {key: config[key] for key in keys if config.get(key) is not None}


def _copy_tokenizer(source: str | Path | None, staging: Path) -> None:
    """Copy the tokenizer's files, and code that `auto_map` may name, from `source`; kumi never runs that code."""
    if source is None:
        return
    code = sorted(path.name for path in Path(source).glob("*.py"))
    for name in (*TOKENIZER_FILES, *code):
        if (Path(source) / name).exists():
            copy_into(staging, Path(source), name)


def _publish(staging: Path, folder: Path) -> None:
    """Flush the files of `staging` to disk, then rename it to `folder`."""
    for file in staging.iterdir():
        sync(file)
    sync(staging)
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)
    sync(folder.absolute().parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
