"""Write Megatron-Core's distributed checkpoints (torch_dist) without Megatron, one chunk in memory per thread."""

from __future__ import annotations

import argparse
import json
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kumi.convert.files.safetensors_write import sync
from kumi.convert.files.slices import Dims
from kumi.convert.files.stream import Reader, num_threads
from kumi.convert.hf import write_folder
from kumi.convert.megatron import dcp_write
from kumi.convert.megatron.read_megatron import bounding_box, select_in_box, tensor_bytes
from kumi.errors import ModelError
from kumi.files.output import remove_tree
from kumi.megatron import model_fields as megatron_model
from kumi.megatron.args import MLA_DEFAULTS, flags_to_add, to_args
from kumi.megatron.checkpoint_files import COMMON, COMMON_ENTRY, LATEST
from kumi.megatron.tensor_names import VOCABULARY, CheckpointKeys, checkpoint_keys, extra_states, megatron_parts
from kumi.progress import show_progress
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part
from kumi.storage.folders import check_free_space

ITERATION = "iter_0000000"
# Bytes of a chunk, if a target can be split.
_CHUNK_BYTES = 2**23
# Most files that are written at the same time.
_MAX_WRITERS = 4
# Upper bound on the bytes of everything but tensors.
_SLACK = 2**24


@dataclass(frozen=True)
class MegatronOptions:
    """The Megatron setup that will load the checkpoint.

    local      True for Megatron-Core's own layers, False for TransformerEngine's
    multiple   the vocabulary is padded to a multiple of it (make_vocab_size_divisible_by x tp)
    """

    local: bool = False
    multiple: int = 1


@dataclass
class _Target:
    """A slice of a tensor to write, and the parts of native tensors that it consists of."""

    name: str
    shape: Dims
    start: Dims
    extent: Dims
    sources: list[tuple[Param, Part]] = field(default_factory=list)


def write_megatron_folder(
    folder: str | Path,
    spec: ModelSpec,
    reader: Reader,
    *,
    dtypes: Mapping[str, str],
    config: Mapping[str, Any],
    tokenizer: Path | None,
    options: MegatronOptions | None = None,
) -> list[str]:
    """Write the Megatron folder `folder`; return notes for the user.

    `dtypes` are the dtypes to write, by native name. Each of a few threads holds one chunk and one native slice in
    memory. Raise RefusedError, before writing, when the folder is not empty or the disk is too small. On any error
    nothing is left behind.
    """
    folder, options = Path(folder), options or MegatronOptions()
    if options.multiple < 1:
        raise ModelError(f"multiple={options.multiple}: the vocabulary is padded to a multiple of this; give 1 or more")
    keys = checkpoint_keys(spec, local=options.local, multiple=options.multiple)
    targets = _targets(spec, keys, dtypes)
    write_folder.check_target(folder, replace=False)
    sizes = {name: ITEMSIZE[dtype] for name, dtype in dtypes.items()}
    check_free_space(folder, tensor_bytes(spec, keys, sizes) + _SLACK, "the model")
    staging = write_folder.staging_folder(folder)
    remove_tree(staging)
    inner = staging / ITERATION
    inner.mkdir(parents=True)
    try:
        common = _common_state(spec, keys, dtypes)
        _write_tensors(inner, targets, reader, dtypes, _objects(spec, keys, common), title=str(folder))
        torch.save(common, inner / COMMON)
        backend = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        _write_json(inner / "metadata.json", backend)
        (staging / LATEST).write_text("0", encoding="utf-8")
        (staging / "hf").mkdir()
        _write_json(staging / "hf" / "config.json", write_folder._with_dtype(dict(config), dtypes))
        write_folder._copy_tokenizer(tokenizer, staging / "hf")
        _publish(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return _notes(spec, common.get("args"))


def _notes(spec: ModelSpec, args: argparse.Namespace | None) -> list[str]:
    """Return notes on the features that Megatron computes differently, and on arguments that it must be given."""
    notes = [
        f"Megatron-Core's GPTModel will not compute this model: {problem}"
        for problem in megatron_model.unsupported_by_megatron(spec)
    ]
    if args is None:
        return notes
    notes += [
        f"Megatron-LM has {name}={value:g} built in for latent attention, but this model has {getattr(args, name):g}"
        for name, value in MLA_DEFAULTS.items()
        if getattr(args, name, value) != value
    ]
    given = flags_to_add(args)
    if given:
        notes.append(f"Megatron-LM's --use-checkpoint-args does not restore these arguments; give them too: {given}")
    return notes


def _common_state(spec: ModelSpec, keys: CheckpointKeys, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Return the non-tensor state, as Megatron-LM saves it."""
    args = to_args(spec, dtype=dtypes["model.embed_tokens.weight"], padded_vocab=keys.vocab)
    content = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {"iteration": 0, "checkpoint_version": 3.0, "content_metadata": content}
    return state if args is None else {"args": args, **state}


def _objects(spec: ModelSpec, keys: CheckpointKeys, common: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the common state, where megatron-core reads it since 0.17, and empty entries for modules' extra states."""
    yield f"{COMMON_ENTRY}shard_0_1", [dict(common)]
    nothing = [None]
    for name in extra_states(spec, keys):
        yield name, nothing


def _targets(spec: ModelSpec, keys: CheckpointKeys, dtypes: Mapping[str, str]) -> list[_Target]:
    """Return the slices to write, in the order of the model; raise ModelError if parts of a tensor differ in dtype."""
    targets: dict[tuple[str, Dims], _Target] = {}
    kinds: dict[str, str] = {}
    for param in tensors(spec):
        for part in megatron_parts(spec, param, keys):
            start, extent = bounding_box(part, part.at, part.size)
            target = targets.setdefault((part.name, start), _Target(part.name, part.shape, start, extent))
            target.sources.append((param, part))
            dtype = kinds.setdefault(part.name, dtypes[param.name])
            if dtype != dtypes[param.name]:
                raise ModelError(
                    f"{param.name!r} is {dtypes[param.name]}, but other parts of Megatron's {part.name!r} "
                    f"are {dtype}; choose one dtype for all with --dtype"
                )
    return list(targets.values())


def _write_tensors(
    folder: Path,
    targets: Sequence[_Target],
    reader: Reader,
    dtypes: Mapping[str, str],
    objects: Iterable[tuple[str, Any]],
    *,
    title: str,
) -> None:
    """Write the distributed checkpoint in a few threads, each with its own files."""
    sizes = [prod(target.extent) * ITEMSIZE[dtypes[target.sources[0][0].name]] for target in targets]
    lock, done = threading.Lock(), 0
    with show_progress(title, sum(sizes)) as update:

        def wrote(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                update(done)

        groups = [
            _all_chunks(group, reader, dtypes)
            for group in _split_evenly(targets, sizes, min(_MAX_WRITERS, num_threads()))
        ]
        dcp_write.write_dcp(folder, groups, objects, wrote=wrote)


def _split_evenly(targets: Sequence[_Target], sizes: Sequence[int], count: int) -> list[list[_Target]]:
    """Split `targets`, in order, into at most `count` groups of about equal bytes."""
    group_bytes, groups, assigned = sum(sizes) / count, [[]], 0.0  # type: ignore[var-annotated]
    for target, size in zip(targets, sizes):
        if assigned >= group_bytes * len(groups) and groups[-1]:
            groups.append([])
        groups[-1].append(target)
        assigned += size
    return groups


class _Buffers:
    """One reused buffer per use, because the system does not get back memory that threads free and reallocate."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, use: str, shape: Dims, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, valid until the next call with this `use`. Its storage has no other data."""
        size = prod(shape) * dtype.itemsize
        if use not in self._buffers or self._buffers[use].numel() < size:
            self._buffers.pop(use, None)  # freed before the larger buffer is allocated
            self._buffers[use] = torch.empty(size, dtype=torch.uint8)
        # torch.save writes the entire storage of a slice.
        return torch.frombuffer(self._buffers[use].numpy(), dtype=dtype, count=prod(shape)).view(shape)


def _all_chunks(targets: Iterable[_Target], reader: Reader, dtypes: Mapping[str, str]) -> Iterator[dcp_write.ChunkData]:
    """Yield the chunks of `targets`; each is valid until the next is requested."""
    buffers = _Buffers()
    for target in targets:
        yield from _chunks(target, reader, dtypes, buffers)


def _chunks(
    target: _Target, reader: Reader, dtypes: Mapping[str, str], buffers: _Buffers
) -> Iterator[dcp_write.ChunkData]:
    """Yield the chunks of `target`, then the padding of the vocabulary."""
    param, part = target.sources[0]
    dtype = getattr(torch, dtypes[param.name])
    if len(target.sources) > 1 or not part.in_order or prod(part.size) != prod(target.extent):
        yield dcp_write.ChunkData(target.name, target.shape, target.start, _assemble(target, reader, dtype, buffers))
    else:
        yield from _split_rows(target, reader, dtype, buffers)
    padding = target.shape[0] - target.extent[0] if target.name in VOCABULARY else 0
    if padding:
        rows = torch.zeros(padding, *target.extent[1:], dtype=dtype)
        yield dcp_write.ChunkData(target.name, target.shape, (target.extent[0], *target.start[1:]), rows)


def _read_native(reader: Reader, name: str, start: Dims, shape: Dims, dtype: torch.dtype, buffers: _Buffers) -> Tensor:
    """Return a slice of a native tensor, cast to `dtype`."""
    stored: torch.dtype = getattr(torch, reader.dtypes[name])
    data = buffers.take("native", shape, stored)
    reader.read_into(name, start, data)
    return data if stored == dtype else buffers.take("cast", shape, dtype).copy_(data)


def _assemble(target: _Target, reader: Reader, dtype: torch.dtype, buffers: _Buffers) -> Tensor:
    """Return the data of `target`, assembled from several native tensors."""
    out = buffers.take("assembled", target.extent, dtype)
    for param, part in target.sources:
        into = select_in_box(part, part.at, part.size, out).permute(part.order)
        into.copy_(_read_native(reader, param.name, part.start, part.extent, dtype, buffers).reshape(into.shape))
    return out


def _split_rows(
    target: _Target, reader: Reader, dtype: torch.dtype, buffers: _Buffers
) -> Iterator[dcp_write.ChunkData]:
    """Yield the data of `target`, one native slice, split along its first dim larger than 1."""
    param, part = target.sources[0]
    native_dim = next((dim for dim, size in enumerate(part.extent) if size > 1), 0)
    stored_dim = next((dim for dim, size in enumerate(target.extent) if size > 1), 0)
    rows = part.extent[native_dim]
    step = max(1, rows * _CHUNK_BYTES // max(1, prod(part.extent) * dtype.itemsize))
    for low in range(0, rows, step):
        count = min(step, rows - low)
        start = (*part.start[:native_dim], part.start[native_dim] + low, *part.start[native_dim + 1 :])
        size = (*part.extent[:native_dim], count, *part.extent[native_dim + 1 :])
        at = (*target.start[:stored_dim], target.start[stored_dim] + low, *target.start[stored_dim + 1 :])
        extent = (*target.extent[:stored_dim], count, *target.extent[stored_dim + 1 :])
        data = _read_native(reader, param.name, start, size, dtype, buffers)
        yield dcp_write.ChunkData(target.name, target.shape, at, data.view(extent))


def _publish(staging: Path, folder: Path) -> None:
    """Flush the files of `staging` to disk, then rename it to `folder`."""
    for file in sorted(staging.rglob("*")):
        sync(file)
    sync(staging)
    if folder.exists():
        folder.rmdir()
    staging.rename(folder)
    sync(folder.absolute().parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
