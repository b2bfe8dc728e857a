"""Read Megatron-Core's distributed checkpoints (torch_dist), from Megatron-LM and Megatron-Bridge, without Megatron.

A folder is a checkpoint (`iter_0001000`, with `.metadata`), or contains checkpoints and names the newest one in
`latest_checkpointed_iteration.txt`. The model's configuration comes from the first of: the given config.json; one in
the folder, its parent, or a subfolder `hf` of either; Megatron-LM's arguments in the checkpoint; Megatron-Bridge's
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

from kumi.convert.files.slices import Dims, file_slice, overlap, rows_per_file_index
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

# The dtypes that parameters may have.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Beginning of the names of tensors that hold one layer; other checkpoints have tensors that hold all layers.
_LAYER_KEY = re.compile(r"decoder\.layers\.\d+\.")
# Name prefixes of tensors that are not parameters of the model, and their meaning.
_LEFT_OUT = {
    "optimizer.": "optimizer state",
    "chained_": "optimizer state",
    "rng_state": "random number generators",
    "mtp.": "layers for multi-token prediction",
}


@dataclass(frozen=True)
class MegatronModel:
    """A checked Megatron checkpoint as a model. Native tensors, in kumi's names and shapes, are assembled on demand.

    tokenizer   folder that may contain a tokenizer
    keys        naming scheme of the checkpoint's tensors
    params      native tensors, by name
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
        """Return a reader of the model's native tensors."""
        return Reader(self.dtypes, self.read_into, self.block_end)

    def read_into(self, name: str, start: Dims, out: Tensor) -> None:
        """Fill `out` with the slice of the native tensor `name` that begins at `start`."""
        for part in megatron_parts(self.spec, self.params[name], self.keys):
            common = overlap(part.start, part.extent, start, tuple(out.shape))
            if common:
                first, shape = common
                target = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, start, shape))
                out[target] = self._read_part(part, tuple(a - b for a, b in zip(first, part.start)), shape)

    def block_end(self, name: str, row: int) -> int:
        """Return the end (exclusive) of the block of rows that begins at `row`.

        The block has about `BLOCK_BYTES`, rounded up to rows that each part of the tensor can be read in.
        """
        param = self.params[name]
        param_parts, rows = megatron_parts(self.spec, param, self.keys), param.shape[0]
        row_bytes = prod(param.shape[1:]) * ITEMSIZE[self.dtypes[name]]
        row_group = max(rows_per_file_index(part) for part in param_parts)
        return min(rows, -(-(row + max(1, BLOCK_BYTES // row_bytes)) // row_group) * row_group)

    def _read_part(self, part: Part, offsets: Dims, shape: Dims) -> Tensor:
        """Return the slice of `part` that begins at `offsets` and has the shape `shape`, in native dims."""
        source = file_slice(part, offsets, shape)
        start, extent = bounding_box(part, source.at, source.size)
        data = select_in_box(part, source.at, source.size, self.checkpoint.read(part.name, start, extent))
        native = data.permute(part.order).reshape(source.shape)
        return native[tuple(slice(low, low + count) for low, count in zip(source.skip, shape))]


def _leading_dims(part: Part) -> int:
    """Return the number of leading dims that `part`'s view shares with the file's tensor."""
    pairs = zip(part.view, part.shape)
    return next((dim for dim, (viewed, stored) in enumerate(pairs) if viewed != stored), len(part.shape))


def bounding_box(part: Part, at: Dims, size: Dims) -> tuple[Dims, Dims]:
    """Return start and extent of a slice of the file's tensor that contains a slice of `part`'s view.

    The slice of the view begins at `at` and has the shape `size`. If the view splits a dim of the tensor into several,
    the returned slice has complete rows of the first of these, and is complete in all dims after the split dim.
    """
    lead = _leading_dims(part)
    if part.view == part.shape:
        return at, size
    rows, rest = part.shape[lead] // part.view[lead], part.shape[lead + 1 :]
    return (*at[:lead], at[lead] * rows, *(0 for _ in rest)), (*size[:lead], size[lead] * rows, *rest)


def select_in_box(part: Part, at: Dims, size: Dims, data: Tensor) -> Tensor:
    """Return the slice of `part`'s view in `data`, the content of its `bounding_box`; it shares memory with `data`."""
    if part.view == part.shape:
        return data
    lead = _leading_dims(part) + 1
    viewed = data.view(*size[:lead], *part.view[lead:])
    within = tuple(slice(low, low + count) for low, count in zip(at[lead:], size[lead:]))
    return viewed[(*(slice(None) for _ in range(lead)), *within)]


def open_megatron_model(folder: Path, config: str | Path | None = None) -> MegatronModel:
    """Open the model in a Megatron folder; `config` is the path of its config.json, if given.

    Raise ModelError for a tensor that is missing, unknown or of another shape, RefusedError for damaged or hostile
    files.
    """
    inner = newest_checkpoint(folder)
    saved = dcp_read.open_checkpoint(inner)
    model_config, tokenizer = _config(inner, folder, saved, config)
    spec = families.from_hf(model_config)
    keys, left_out = match_tensors(inner, spec, saved.tensors)
    spec = replace(spec, notes=(*spec.notes, *left_out))
    params = {param.name: param for param in tensors(spec)}
    dtypes = {name: _dtype(inner, spec, param, keys, saved) for name, param in params.items()}
    return MegatronModel(inner, spec, model_config, dtypes, tokenizer, keys, saved, params)


def _config(
    inner: Path, folder: Path, saved: dcp_read.Checkpoint, given: str | Path | None
) -> tuple[dict[str, Any], Path | None]:
    """Return the model's config.json, read or derived from Megatron's arguments, and the tokenizer's folder or None.

    `inner` is the folder of the checkpoint that was found in `folder`.
    """
    if given is not None:
        path = Path(given)
        return families.read_config(path), path if path.is_dir() else path.parent
    outer = inner.parent if inner != folder or (inner.parent / LATEST).is_file() else inner
    for place in (inner, inner / "hf", outer, outer / "hf"):
        if (place / "config.json").is_file():
            return families.read_config(place), place
    common = _common_state(inner, saved)
    if common.get("args") is not None:
        return to_config(vars(common["args"])), None
    if (inner / RUN_CONFIG).is_file():
        return to_config(from_run_config(_run_config(inner / RUN_CONFIG))), None
    raise ModelError(
        f"{inner}: has neither Megatron-LM's arguments nor {RUN_CONFIG}, so the model's configuration is "
        f"unknown; give its config.json with --config"
    )


def _common_state(inner: Path, saved: dcp_read.Checkpoint) -> dict[str, Any]:
    """Return Megatron's non-tensor state: from its own file or, since megatron-core 0.17, from an entry.

    The state is empty if there is none, or none with Megatron-LM's arguments. Raise RefusedError if it is damaged.
    """
    path, entry = inner / COMMON, next((name for name in saved.objects if name.startswith(COMMON_ENTRY)), None)
    if path.exists():
        try:
            with open_stream(untrusted_file(inner, COMMON, RefusedError)) as file:
                state = pickles.load_archive(file, str(path)).content
        except OSError as error:
            raise RefusedError(f"{path}: cannot be read ({explain(error)}); copy it again") from None
    else:
        state = saved.load(entry) if entry is not None else {}
    state = state[0] if isinstance(state, list) and len(state) == 1 else state
    if not isinstance(state, dict):
        raise RefusedError(
            f"{path if path.is_file() else inner}: the common state is a {type(state).__name__} "
            f"instead of a dict; copy the checkpoint again"
        )
    args = state.get("args")
    return state if hasattr(args, "__dict__") and not isinstance(args, pickles.Unread) else {}


def _run_config(path: Path) -> Mapping[str, Any]:
    """Return the `model` of Megatron-Bridge's run_config.yaml; raise ModelError if it cannot be read."""
    import yaml  # type: ignore[import-untyped]

    try:
        model = yaml.safe_load(read_bytes(path.parent, path.name))["model"]
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{path}: cannot be read ({error!s:.120}); give the model's config.json with --config"
        ) from None
    if not isinstance(model, dict):
        raise ModelError(
            f"{path}: its model is a {type(model).__name__} instead of a table; give a config.json with --config"
        )
    return model


def match_tensors(
    folder: Path, spec: ModelSpec, stored: Mapping[str, dcp_read.ChunkedTensor]
) -> tuple[CheckpointKeys, list[str]]:
    """Return the naming scheme of the checkpoint tensors `stored`, and notes on the tensors that kumi leaves out.

    Raise ModelError unless the remaining tensors are exactly those of `spec`.
    """
    names = {name for name in stored if not name.startswith(tuple(_LEFT_OUT))}
    if "decoder.final_norm.weight" in names:
        raise ModelError(
            f"{folder}: written by Megatron-Core's HybridModel, with one sublayer per index; kumi reads "
            f"checkpoints of GPTModel only"
        )
    vocab = (
        stored[VOCABULARY[0]].shape[0] if VOCABULARY[0] in names and stored[VOCABULARY[0]].shape else spec.vocab_size
    )
    if vocab < spec.vocab_size:
        raise ModelError(
            f"{folder}: {VOCABULARY[0]!r} has {vocab} rows, but vocab_size={spec.vocab_size} in the model's "
            f"config.json; the two belong to different models"
        )
    by_layer = any(_LAYER_KEY.match(name) for name in names)
    # True if the gate and the up projection are tensors of their own.
    halves = any(name.endswith(("_w", "_v")) for name in names)
    # Names of Transformer Engine's layers, then of Megatron's own ("local").
    schemes = [CheckpointKeys(not by_layer, vocab, local, halves) for local in (False, True)]
    keys = next((scheme for scheme in schemes if megatron_tensors(spec, scheme).keys() <= names), schemes[0])
    _check_names_and_shapes(folder, spec, megatron_tensors(spec, keys), {name: stored[name].shape for name in names})
    kinds = {kind for name in stored for prefix, kind in _LEFT_OUT.items() if name.startswith(prefix)}
    return keys, [f"left out of {folder.name}: {kind}" for kind in sorted(kinds)]


def _check_names_and_shapes(
    folder: Path, spec: ModelSpec, expected: Mapping[str, Dims], shapes: Mapping[str, Dims]
) -> None:
    """Raise ModelError unless the checkpoint's `shapes`, by name, are those `expected` of the model."""
    for name, shape in expected.items():
        if name not in shapes:
            hint = (
                ""
                if name != "output_layer.weight"
                else "; if the head is the embedding, set tie_word_embeddings to true in config.json"
            )
            raise ModelError(f"{folder}: {name!r} is missing from the checkpoint of this {spec.family} model{hint}")
        if shapes[name] != shape:
            raise ModelError(
                f"{folder}: {name!r} is {shapes[name]} in the checkpoint, but the configuration gives "
                f"{shape}; the two belong to different models"
            )
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        raise ModelError(
            f"{folder}: {unknown[0]!r} {shapes[unknown[0]]} is in the checkpoint, but the {spec.family} model "
            f"that the configuration describes has no such tensor; give the right config.json with --config"
        )


def _dtype(folder: Path, spec: ModelSpec, param: Param, keys: CheckpointKeys, saved: dcp_read.Checkpoint) -> str:
    """Return the dtype of `param`; raise ModelError unless all its parts have the same supported dtype."""
    dtypes = {saved.tensors[part.name].dtype: part.name for part in megatron_parts(spec, param, keys)}
    for dtype, name in dtypes.items():
        if dtype not in _DTYPES:
            raise ModelError(
                f"{folder}: {name!r} is {_short(dtype)}, and kumi reads parameters in "
                f"{', '.join(map(_short, _DTYPES))} only; save the checkpoint in one of these"
            )
    if len(dtypes) > 1:
        listed = " and ".join(f"{name!r} is {_short(dtype)}" for dtype, name in dtypes.items())
        raise ModelError(
            f"{folder}: {listed}, but both are parts of {param.name!r} and must have one dtype; save them in one dtype"
        )
    return _short(next(iter(dtypes)))


def _short(dtype: torch.dtype) -> str:
    """Return the name of `dtype`, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(spec: ModelSpec, keys: CheckpointKeys, itemsizes: Mapping[str, int]) -> int:
    """Return the bytes of a checkpoint's tensors; `itemsizes` by native name."""
    sizes = {part.name: itemsizes[param.name] for param in tensors(spec) for part in megatron_parts(spec, param, keys)}
    return sum(prod(shape) * sizes[name] for name, shape in megatron_tensors(spec, keys).items())
