"""The model in a checkpoint of kumi: tensors "model/<parameter>", and the config.json it is exported with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kumi.convert import carried, hf_write
from kumi.convert.safetensors_read import Span
from kumi.errors import ModelError
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec
from kumi.storage import checkpoint

PREFIX = "model/"
SHARD_BYTES = 10**9


@dataclass(frozen=True)
class SavedModel:
    """An open checkpoint, seen as a model."""

    checkpoint: checkpoint.Checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.checkpoint.meta["hf_config"]
        return found

    @property
    def tokenizer(self) -> Path | None:
        folder = self.checkpoint.meta.get("tokenizer")
        return Path(folder) if folder else None

    @property
    def carried_from(self) -> str | None:
        """The Hugging Face folder of what the model carries along, where that is not in the checkpoint."""
        found: str | None = self.checkpoint.meta.get("carried_from")
        return found

    def dtype(self, name: str) -> str:
        return str(self.checkpoint.tensors[PREFIX + name].dtype).removeprefix("torch.")

    def read(self, name: str) -> Tensor:
        return self.checkpoint.read(PREFIX + name)


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` looks like a checkpoint of kumi, whole or damaged."""
    return (folder / "meta.json").exists() or (folder / "index.json").exists()


def open_model(folder: Path) -> SavedModel:
    """The model in the checkpoint `folder`; RefusedError where it is damaged."""
    saved = SavedModel(checkpoint.open(folder))
    if "hf_config" not in saved.checkpoint.meta:
        raise ModelError(f"{folder}: its meta.json has no hf_config; it was not written by kumi train or kumi convert")
    return saved


def check(saved: SavedModel, spec: ModelSpec) -> None:
    """Nothing, or an error naming the tensor that is missing, unknown or of another shape."""
    wanted = {PREFIX + param.name: param.shape for param in tensors(spec)}
    for name, shape in wanted.items():
        saved.checkpoint.expect(name, shape)
    unknown = [name for name in saved.checkpoint.tensors if name.startswith(PREFIX) and name not in wanted]
    if unknown:
        raise ModelError(f"{saved.checkpoint.folder}: {unknown[0]!r} has no place in the model of its hf_config")


def write_model(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], *, config: Mapping[str, Any], tokenizer: Path | None,
    beside: Mapping[str, Span],
) -> None:  # fmt: skip
    """Write `folder` (absent or empty), a checkpoint of a model alone; about `SHARD_BYTES` are held at a time.

    `beside` is what the model carries along.
    """
    temporary = hf_write.unfinished(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    if folder.exists():
        folder.rmdir()
    try:
        shards = 0
        for pieces in _shards(tensors):
            checkpoint.write_pieces(temporary, shards, pieces)
            shards += 1
        if beside:
            carried.write_spans(temporary / carried.FILE, beside)
        meta = {"hf_config": dict(config), "tokenizer": None if tokenizer is None else str(tokenizer.absolute())}
        checkpoint.commit(temporary, folder, meta, ranks=shards)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[list[checkpoint.Piece]]:
    """The tensors as pieces, in lists of no more than `SHARD_BYTES` where a tensor is no larger than that."""
    pieces: list[checkpoint.Piece] = []
    for name, tensor in tensors:
        if pieces and sum(piece.data.nbytes for piece in pieces) + tensor.nbytes > SHARD_BYTES:
            yield pieces
            pieces = []
        pieces.append(checkpoint.Piece(PREFIX + name, tuple(tensor.shape), (0,) * tensor.ndim, tensor))
    yield pieces
