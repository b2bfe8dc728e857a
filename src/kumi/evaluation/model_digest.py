"""A digest of a model's content: two models have the same digest only if they have the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kumi.convert import kumi_checkpoint
from kumi.files.untrusted import inside, open_stream
from kumi.inference.model_files import ModelFiles

_BLOCK = 1 << 22  # bytes that are read at a time


def model_digest(files: ModelFiles) -> str:
    """Return the SHA-256 of the model's weights, configuration and tokenizer.

    Weight files are read completely. Only the index of a checkpoint of kumi is read, which has the checksums.
    """
    paths = list(_files(files))
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_file_digest, paths)
        return hashlib.sha256("".join(digests).encode()).hexdigest()


def _files(files: ModelFiles) -> Iterator[Path]:
    """Yield the files whose content makes the digest."""
    for folder in dict.fromkeys((files.folder, files.source.folder)):
        if kumi_checkpoint.is_checkpoint(folder):
            yield from (folder / "index.json", folder / "meta.json")
        else:
            names = [*folder.glob("*config.json"), *folder.glob("*.safetensors")]
            yield from (inside(folder, path.name) for path in sorted(names))
    yield files.tokenizer_folder / "tokenizer.json"


def _file_digest(path: Path) -> str:
    sha = hashlib.sha256()
    with open_stream(path) as file:
        while block := file.read(_BLOCK):
            sha.update(block)
    return sha.hexdigest()
