"""Writing Megatron-Core's distributed checkpoints (torch_dist) without Megatron: from storage, a piece at a time."""

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
from kumi.convert.files.stream import Reader, threads
from kumi.convert.hf import write_folder
from kumi.convert.megatron import dcp_write
from kumi.convert.megatron.read_megatron import box, inside, tensor_bytes
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
from kumi.storage.folders import free_space_check

ITERATION = "iter_0000000"
# The most that a piece has where it can be cut; files written at once; and what is written besides tensors.
PIECE_BYTES, MAX_THREADS, _SLACK = 2**23, 4, 2**24


@dataclass(frozen=True)
class Options:
    """How the Megatron that loads it is set up: `local`, with Megatron-Core's own layers, not TransformerEngine's;
    `multiple`, what the vocabulary is padded to a multiple of (make_vocab_size_divisible_by x tp)."""

    local: bool = False
    multiple: int = 1


@dataclass
class _Target:
    """A rectangle of a tensor to write, and the native parts that it is made of."""

    name: str
    shape: Dims
    start: Dims
    extent: Dims
    made_of: list[tuple[Param, Part]] = field(default_factory=list)


def write(
    folder: str | Path,
    spec: ModelSpec,
    reader: Reader,
    *,
    dtypes: Mapping[str, str],
    config: Mapping[str, Any],
    tokenizer: Path | None,
    options: Options | None = None,
) -> list[str]:
    """Write the Megatron folder `folder`: what there is to know of it, in sentences.

    `dtypes` says what each native tensor is stored in, by name. No more is held than a piece, and a native rectangle
    that it is made of, in each of a few threads. RefusedError where the folder is not empty or the disk too
    small, before anything is written; nothing is left behind after an error.
    """
    folder, options = Path(folder), options or Options()
    if options.multiple < 1:
        raise ModelError(f"a vocabulary cannot be padded to a multiple of {options.multiple}; give 1 or more")
    keys = checkpoint_keys(spec, local=options.local, multiple=options.multiple)
    targets = _targets(spec, keys, dtypes)
    write_folder.check_target(folder, replace=False)
    sizes = {name: ITEMSIZE[dtype] for name, dtype in dtypes.items()}
    free_space_check(folder, tensor_bytes(spec, keys, sizes) + _SLACK, "the model")
    part = write_folder.unfinished(folder)
    remove_tree(part)
    inner = part / ITERATION
    inner.mkdir(parents=True)
    try:
        common = _common(spec, keys, dtypes)
        _write_tensors(inner, targets, reader, dtypes, _objects(spec, keys, common), title=str(folder))
        torch.save(common, inner / COMMON)
        backend = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        _write_json(inner / "metadata.json", backend)
        (part / LATEST).write_text("0", encoding="utf-8")
        (part / "hf").mkdir()
        _write_json(part / "hf" / "config.json", write_folder._with_dtype(dict(config), dtypes))
        write_folder._copy_tokenizer(tokenizer, part / "hf")
        _publish(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return _notes(spec, common.get("args"))


def _notes(spec: ModelSpec, args: argparse.Namespace | None) -> list[str]:
    """What Megatron will not compute as the model does, and what it does not take from the checkpoint."""
    notes = [
        f"Megatron-Core's GPTModel will not compute this model: {problem}"
        for problem in megatron_model.unsupported_by_megatron(spec)
    ]
    if args is None:
        return notes
    notes += [
        f"Megatron-LM has {name}={value:g} built in for latent attention, this model {getattr(args, name):g}"
        for name, value in MLA_DEFAULTS.items()
        if getattr(args, name, value) != value
    ]
    given = flags_to_add(args)
    if given:
        notes.append(f"Megatron-LM's --use-checkpoint-args does not take these from it; give them too: {given}")
    return notes


def _common(spec: ModelSpec, keys: CheckpointKeys, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """The state that is no tensor, as Megatron-LM saves it."""
    args = to_args(spec, dtype=dtypes["model.embed_tokens.weight"], padded_vocab=keys.vocab)
    content = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    found: dict[str, Any] = {"iteration": 0, "checkpoint_version": 3.0, "content_metadata": content}
    return found if args is None else {"args": args, **found}


def _objects(spec: ModelSpec, keys: CheckpointKeys, common: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries without content for modules' extra states, and the common state where later versions look for it."""
    yield f"{COMMON_ENTRY}shard_0_1", [dict(common)]
    nothing = [None]
    for name in extra_states(spec, keys):
        yield name, nothing


def _targets(spec: ModelSpec, keys: CheckpointKeys, dtypes: Mapping[str, str]) -> list[_Target]:
    """What to write, in the order of the model; each of a size that can be held. ModelError where dtypes differ."""
    found: dict[tuple[str, Dims], _Target] = {}
    kinds: dict[str, str] = {}
    for param in tensors(spec):
        for part in megatron_parts(spec, param, keys):
            start, extent = box(part, part.at, part.size)
            target = found.setdefault((part.name, start), _Target(part.name, part.shape, start, extent))
            target.made_of.append((param, part))
            dtype = kinds.setdefault(part.name, dtypes[param.name])
            if dtype != dtypes[param.name]:
                raise ModelError(
                    f"{param.name!r} is {dtypes[param.name]}, and Megatron's {part.name!r}, which it is a "
                    f"part of, {dtype}; parts of one tensor must have one dtype"
                )
    return list(found.values())


def _write_tensors(
    folder: Path,
    targets: Sequence[_Target],
    reader: Reader,
    dtypes: Mapping[str, str],
    objects: Iterable[tuple[str, Any]],
    *,
    title: str,
) -> None:
    """Writes the distributed checkpoint, a file or more for each of some threads."""
    sizes = [prod(one.extent) * ITEMSIZE[dtypes[one.made_of[0][0].name]] for one in targets]
    lock, done = threading.Lock(), 0
    with show_progress(title, sum(sizes)) as update:

        def wrote(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                update(done)

        groups = [_all_pieces(group, reader, dtypes) for group in _dealt(targets, sizes, min(MAX_THREADS, threads()))]
        dcp_write.write(folder, groups, objects, wrote=wrote)


def _dealt(targets: Sequence[_Target], sizes: Sequence[int], count: int) -> list[list[_Target]]:
    """`targets` in no more than `count` groups of about as many bytes, in order."""
    share, groups, begun = sum(sizes) / count, [[]], 0.0  # type: ignore[var-annotated]
    for target, size in zip(targets, sizes):
        if begun >= share * len(groups) and groups[-1]:
            groups.append([])
        groups[-1].append(target)
        begun += size
    return groups


class _Buffers:
    """Memory for each of a few uses, used again: what is freed and asked for again in several threads is not given
    back."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, use: str, shape: Dims, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor with a storage of its own size, valid until the next call for the same `use`."""
        size = prod(shape) * dtype.itemsize
        if use not in self._kept or self._kept[use].numel() < size:
            self._kept.pop(use, None)  # gone before a larger one is there
            self._kept[use] = torch.empty(size, dtype=torch.uint8)
        # A slice would have all of the storage, which torch.save would write.
        return torch.frombuffer(self._kept[use].numpy(), dtype=dtype, count=prod(shape)).view(shape)


def _all_pieces(targets: Iterable[_Target], reader: Reader, dtypes: Mapping[str, str]) -> Iterator[dcp_write.Piece]:
    """The pieces of `targets`, each of which is valid until the next one is asked for."""
    buffers = _Buffers()
    for target in targets:
        yield from _pieces(target, reader, dtypes, buffers)


def _pieces(target: _Target, reader: Reader, dtypes: Mapping[str, str], buffers: _Buffers) -> Iterator[dcp_write.Piece]:
    """The rectangle `target` in pieces, with the padding of the vocabulary behind it."""
    param, part = target.made_of[0]
    dtype = getattr(torch, dtypes[param.name])
    if len(target.made_of) > 1 or not part.in_order or prod(part.size) != prod(target.extent):
        yield dcp_write.Piece(target.name, target.shape, target.start, _assembled(target, reader, dtype, buffers))
    else:
        yield from _cut(target, reader, dtype, buffers)
    padding = target.shape[0] - target.extent[0] if target.name in VOCABULARY else 0
    if padding:
        rows = torch.zeros(padding, *target.extent[1:], dtype=dtype)
        yield dcp_write.Piece(target.name, target.shape, (target.extent[0], *target.start[1:]), rows)


def _native(reader: Reader, name: str, start: Dims, shape: Dims, dtype: torch.dtype, buffers: _Buffers) -> Tensor:
    """A rectangle of a native tensor, in `dtype`."""
    stored: torch.dtype = getattr(torch, reader.dtypes[name])
    data = buffers.take("native", shape, stored)
    reader.read_into(name, start, data)
    return data if stored == dtype else buffers.take("cast", shape, dtype).copy_(data)


def _assembled(target: _Target, reader: Reader, dtype: torch.dtype, buffers: _Buffers) -> Tensor:
    """The data of `target`, put together from several native tensors."""
    out = buffers.take("whole", target.extent, dtype)
    for param, part in target.made_of:
        into = inside(part, part.at, part.size, out).permute(part.order)
        into.copy_(_native(reader, param.name, part.start, part.extent, dtype, buffers).reshape(into.shape))
    return out


def _cut(target: _Target, reader: Reader, dtype: torch.dtype, buffers: _Buffers) -> Iterator[dcp_write.Piece]:
    """The data of `target`, which are one native rectangle, cut between the rows of its first long dim."""
    param, part = target.made_of[0]
    native = next((dim for dim, size in enumerate(part.extent) if size > 1), 0)
    stored = next((dim for dim, size in enumerate(target.extent) if size > 1), 0)
    rows = part.extent[native]
    step = max(1, rows * PIECE_BYTES // max(1, prod(part.extent) * dtype.itemsize))
    for low in range(0, rows, step):
        count = min(step, rows - low)
        start = (*part.start[:native], part.start[native] + low, *part.start[native + 1 :])
        size = (*part.extent[:native], count, *part.extent[native + 1 :])
        at = (*target.start[:stored], target.start[stored] + low, *target.start[stored + 1 :])
        extent = (*target.extent[:stored], count, *target.extent[stored + 1 :])
        data = _native(reader, param.name, start, size, dtype, buffers)
        yield dcp_write.Piece(target.name, target.shape, at, data.view(extent))


def _publish(part: Path, folder: Path) -> None:
    """Put everything on the disk, and only then give it its name."""
    for file in sorted(part.rglob("*")):
        sync(file)
    sync(part)
    if folder.exists():
        folder.rmdir()
    part.rename(folder)
    sync(folder.absolute().parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
