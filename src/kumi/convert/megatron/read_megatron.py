"""Reading Megatron-Core's distributed checkpoints (torch_dist), of Megatron-LM and Megatron-Bridge, without Megatron.

A folder is a checkpoint (`iter_0001000`, with `.metadata`), or has some and names the newest one
(`latest_checkpointed_iteration.txt`). What the model is says, in this order: the config.json that is given; one in the
folder, beside it, or in a folder `hf` there; Megatron-LM's arguments in the checkpoint; Megatron-Bridge's
run_config.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kumi.convert.files.slices import Dims, overlap, seen, unit_rows
from kumi.convert.files.stored_tensor import BLOCK_BYTES
from kumi.convert.files.stream import Reader
from kumi.convert.megatron import dcp_read, pickles
from kumi.errors import ModelError, RefusedError
from kumi.files.untrusted import explain, open_stream, read_bytes
from kumi.files.untrusted import inside as untrusted_file
from kumi.megatron.args import from_run_config, to_config
from kumi.megatron.checkpoint_files import COMMON, COMMON_ENTRY, LATEST, RUN_CONFIG, newest_checkpoint
from kumi.megatron.tensor_names import VOCABULARY, CheckpointKeys, megatron_parts, megatron_tensors
from kumi.spec import families
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYER_KEY = re.compile(r"decoder\.layers\.\d+\.")
# Tensors that are no part of the model, by how their names begin, and what they are.
_LEFT_OUT = {
    "optimizer.": "optimizer state",
    "chained_": "optimizer state",
    "rng_state": "random number generators",
    "mtp.": "layers for multi-token prediction",
}


@dataclass(frozen=True)
class Saved:
    """A checked Megatron checkpoint, seen as a model: its native tensors are put together on demand.

    `tokenizer` is a folder that may have one. `keys` says how the checkpoint is keyed.
    """

    folder: Path
    spec: ModelSpec
    config: Mapping[str, Any]
    dtypes: Mapping[str, str]
    tokenizer: Path | None
    keys: CheckpointKeys
    checkpoint: dcp_read.Checkpoint
    params: Mapping[str, Param]

    def reader(self) -> Reader:
        """The model's tensors, as other formats give theirs."""
        return Reader(self.dtypes, self.read_into, self.cut)

    def read_into(self, name: str, start: Dims, out: Tensor) -> None:
        """Fill `out` with what the native tensor `name` has from the indices `start` on."""
        for part in megatron_parts(self.spec, self.params[name], self.keys):
            found = overlap(part.start, part.extent, start, tuple(out.shape))
            if found:
                first, shape = found
                place = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, start, shape))
                out[place] = self._part(part, tuple(a - b for a, b in zip(first, part.start)), shape)

    def cut(self, name: str, row: int) -> int:
        """The row before which to stop when rows of `name` are read in blocks, and `row` is the next."""
        param = self.params[name]
        own, rows = megatron_parts(self.spec, param, self.keys), param.shape[0]
        row_bytes = prod(param.shape[1:]) * ITEMSIZE[self.dtypes[name]]
        unit = max(unit_rows(part) for part in own)
        return min(rows, -(-(row + max(1, BLOCK_BYTES // row_bytes)) // unit) * unit)

    def _part(self, part: Part, offsets: Dims, shape: Dims) -> Tensor:
        """Of the native rectangle that `part` holds the one of `shape` from `offsets` on."""
        found = seen(part, offsets, shape)
        start, extent = box(part, found.at, found.size)
        data = inside(part, found.at, found.size, self.checkpoint.read(part.name, start, extent))
        whole = data.permute(part.order).reshape(found.shape)
        return whole[tuple(slice(low, low + count) for low, count in zip(found.skip, shape))]


def common_dims(part: Part) -> int:
    """How many leading dims are the same in `part`'s view and in the file's tensor."""
    pairs = zip(part.view, part.shape)
    return next((dim for dim, (one, other) in enumerate(pairs) if one != other), len(part.shape))


def box(part: Part, at: Dims, size: Dims) -> tuple[Dims, Dims]:
    """Start and extent of the smallest rectangle of the file's tensor that has all of the rectangle of `size` from `at`
    on of `part`'s view, which differs from the tensor in that one dim is several there, if at all."""
    lead = common_dims(part)
    if part.view == part.shape:
        return at, size
    rows, rest = part.shape[lead] // part.view[lead], part.shape[lead + 1 :]
    return (*at[:lead], at[lead] * rows, *(0 for _ in rest)), (*size[:lead], size[lead] * rows, *rest)


def inside(part: Part, at: Dims, size: Dims, data: Tensor) -> Tensor:
    """The rectangle of `part`'s view, out of the `data` of its `box`; writing to it writes to `data`."""
    if part.view == part.shape:
        return data
    lead = common_dims(part) + 1
    whole = data.view(*size[:lead], *part.view[lead:])
    within = tuple(slice(low, low + count) for low, count in zip(at[lead:], size[lead:]))
    return whole[(*(slice(None) for _ in range(lead)), *within)]


def open_model(folder: Path, config: str | Path | None = None) -> Saved:
    """The model in a Megatron folder, of the config.json `config` where it is given.

    ModelError where a tensor is missing, unknown or of another shape; RefusedError where files are damaged or hostile.
    """
    inner = newest_checkpoint(folder)
    saved = dcp_read.open_checkpoint(inner)
    found, tokenizer = _config(inner, folder, saved, config)
    spec = families.from_hf(found)
    keys, left_out = check(inner, spec, saved.tensors)
    spec = replace(spec, notes=(*spec.notes, *left_out))
    params = {param.name: param for param in tensors(spec)}
    dtypes = {name: _dtype(inner, spec, param, keys, saved) for name, param in params.items()}
    return Saved(inner, spec, found, dtypes, tokenizer, keys, saved, params)


def _config(
    inner: Path, folder: Path, saved: dcp_read.Checkpoint, given: str | Path | None
) -> tuple[dict[str, Any], Path | None]:
    """The model's config.json, read or made of Megatron's arguments, and its tokenizer's folder, if there is one."""
    if given is not None:
        path = Path(given)
        return families.read_config(path), path if path.is_dir() else path.parent
    outer = inner.parent if inner != folder or (inner.parent / LATEST).is_file() else inner
    for place in (inner, inner / "hf", outer, outer / "hf"):
        if (place / "config.json").is_file():
            return families.read_config(place), place
    common = _common(inner, saved)
    if common.get("args") is not None:
        return to_config(vars(common["args"])), None
    if (inner / RUN_CONFIG).is_file():
        return to_config(from_run_config(_run_config(inner / RUN_CONFIG))), None
    raise ModelError(
        f"{inner}: has neither Megatron-LM's arguments nor {RUN_CONFIG}, so that nothing says what the "
        f"model is; give its config.json with --config"
    )


def _common(inner: Path, saved: dcp_read.Checkpoint) -> dict[str, Any]:
    """What Megatron saved besides tensors: in a file of its own, or, from megatron-core 0.17 on, in an entry."""
    path, entry = inner / COMMON, next((name for name in saved.objects if name.startswith(COMMON_ENTRY)), None)
    if path.exists():
        try:
            with open_stream(untrusted_file(inner, COMMON, RefusedError)) as file:
                found = pickles.load_archive(file, str(path)).content
        except OSError as error:
            raise RefusedError(f"{path}: cannot be read ({explain(error)}); copy it again") from None
    else:
        found = saved.load(entry) if entry is not None else {}
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(found, dict):
        raise RefusedError(f"{path if path.is_file() else inner}: the common state is {type(found).__name__}, no table")
    args = found.get("args")
    return found if hasattr(args, "__dict__") and not isinstance(args, pickles.Unread) else {}


def _run_config(path: Path) -> Mapping[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        found = yaml.safe_load(read_bytes(path.parent, path.name))
        model = found["model"]
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{path}: cannot be read ({error!s:.120}); give the model's config.json with --config"
        ) from None
    if not isinstance(model, dict):
        raise ModelError(f"{path}: its model is {type(model).__name__}, no table; give a config.json with --config")
    return model


def check(folder: Path, spec: ModelSpec, found: Mapping[str, dcp_read.Stored]) -> tuple[CheckpointKeys, list[str]]:
    """How a checkpoint with the tensors `found` is keyed, once it is sure that it holds exactly those of `spec`; and
    what it holds besides and is left out."""
    names = {name for name in found if not name.startswith(tuple(_LEFT_OUT))}
    if "decoder.final_norm.weight" in names:
        raise ModelError(
            f"{folder}: written by Megatron-Core's HybridModel, with one sublayer an index; kumi reads "
            f"those of GPTModel"
        )
    vocab = found[VOCABULARY[0]].shape[0] if VOCABULARY[0] in names and found[VOCABULARY[0]].shape else spec.vocab_size
    if vocab < spec.vocab_size:
        raise ModelError(
            f"{folder}: {VOCABULARY[0]!r} has {vocab} rows, vocab_size={spec.vocab_size} in the model's "
            f"config.json; the two belong to different models"
        )
    by_layer = any(_LAYER_KEY.match(name) for name in names)
    halves = any(name.endswith(("_w", "_v")) for name in names)
    ways = [CheckpointKeys(not by_layer, vocab, local, halves) for local in (False, True)]
    keys = next((way for way in ways if megatron_tensors(spec, way).keys() <= names), ways[0])
    _same(folder, spec, megatron_tensors(spec, keys), {name: found[name].shape for name in names})
    left = {what for name in found for prefix, what in _LEFT_OUT.items() if name.startswith(prefix)}
    return keys, [f"left out of what {folder.name} holds: {what}" for what in sorted(left)]


def _same(folder: Path, spec: ModelSpec, wanted: Mapping[str, Dims], found: Mapping[str, Dims]) -> None:
    for name, shape in wanted.items():
        if name not in found:
            hint = (
                ""
                if name != "output_layer.weight"
                else "; a model whose head is its embedding ties them in config.json"
            )
            raise ModelError(f"{folder}: {name!r} is missing from the checkpoint of this {spec.family} model{hint}")
        if found[name] != shape:
            raise ModelError(
                f"{folder}: {name!r} is {found[name]} in the checkpoint, {shape} in the model of its "
                f"configuration; the two belong to different models"
            )
    unknown = sorted(found.keys() - wanted.keys())
    if unknown:
        raise ModelError(
            f"{folder}: {unknown[0]!r} {found[unknown[0]]} has no place in the {spec.family} model of its "
            f"configuration; kumi would drop it"
        )


def _dtype(folder: Path, spec: ModelSpec, param: Param, keys: CheckpointKeys, saved: dcp_read.Checkpoint) -> str:
    """The dtype of `param`, whose parts must have one."""
    dtypes = {saved.tensors[part.name].dtype: part.name for part in megatron_parts(spec, param, keys)}
    strange = [name for dtype, name in dtypes.items() if dtype not in _DTYPES]
    if strange or len(dtypes) > 1:
        name = (strange or sorted(dtypes.values()))[0]
        raise ModelError(
            f"{folder}: {name!r} is {saved.tensors[name].dtype}; kumi reads parameters in one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
        )
    return str(next(iter(dtypes))).removeprefix("torch.")


def tensor_bytes(spec: ModelSpec, keys: CheckpointKeys, itemsizes: Mapping[str, int]) -> int:
    """The bytes of a checkpoint's tensors, `itemsizes` by native name."""
    sizes = {part.name: itemsizes[param.name] for param in tensors(spec) for part in megatron_parts(spec, param, keys)}
    return sum(prod(shape) * sizes[name] for name, shape in megatron_tensors(spec, keys).items())
