"""Find the files of a model that generates text: its weights, tokenizer, chat template and generation settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.config.stored_config import load_stored_config
from kumi.convert import kumi_checkpoint, merge
from kumi.convert.base_digest import base_digest
from kumi.convert.hf.adapter_write import WEIGHTS as ADAPTER_WEIGHTS
from kumi.convert.hf.publish import model_folder_of
from kumi.convert.hf.write_folder import read_generation
from kumi.convert.merge import AdaptedModel
from kumi.convert.open_model import Source, is_adapter_folder, open_source
from kumi.convert.run_checkpoint import model_of
from kumi.data.chat.template import load_stops
from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError, ModelError
from kumi.files.run_names import CONFIG_FILE
from kumi.files.untrusted import INDEX, brief, read_bytes
from kumi.paths import shown_path
from kumi.spec.data_source import ChatOptions
from kumi.spec.model import ModelSpec

# The largest file of adapters, in bytes, that is read for a digest.
_MAX_ADAPTERS = 8 << 30


@dataclass(frozen=True)
class ModelFiles:
    """The open files of a model with a language head; no weights are in memory yet.

    name: for people: the hub id, or the last part of the path.
    folder: the folder of the weights: a Hugging Face folder, a checkpoint, or adapters.
    source: the model; for adapters, their base model.
    adapted: the adapters on `source`; None for a complete model.
    tokenizer_folder: the folder of the tokenizer and its chat template.
    settings: the content of generation_config.json; empty if there is none.
    chat: how conversations become tokens: as in the run that trained the model, if the model is in that run's folder.
    chosen: for a run folder, a text that says which of its models was chosen; else "".
    """

    name: str
    folder: Path
    source: Source
    adapted: AdaptedModel | None
    tokenizer_folder: Path
    settings: Mapping[str, Any]
    chat: ChatOptions
    chosen: str

    @property
    def spec(self) -> ModelSpec:
        return self.source.spec


def find_model(path: str | Path, *, base: str | Path | None = None, checkpoint: str | int | None = None) -> ModelFiles:
    """Open the model at `path`: a Hugging Face folder or hub id, a checkpoint, a run folder, or adapters.

    base: the base model of adapters, if it is not the base that the adapters name.
    checkpoint: of a run folder, as in `kumi.convert.run_checkpoint.choose_model`.

    Raise ConfigError unless there is a model with a tokenizer, and for adapters their base model; ModelError for files
    that kumi does not support, and for a reward model; RefusedError for damaged files.
    """
    given = model_folder_of(path, "the model", checkpoint)
    if not given.is_dir():
        raise ConfigError(f"{shown_path(path)}: neither a folder nor a hub id (org/name); name a model's folder")
    chosen = model_of(given, checkpoint)
    folder = chosen.folder
    adapted = None
    if is_adapter_folder(folder):
        adapted = merge.open_unmerged(folder, None if base is None else str(base))
    elif base is not None:
        raise ConfigError(
            f"base={str(base)!r}: only adapters have a base model, and {folder} holds a complete model; leave base out"
        )
    source = open_source(folder) if adapted is None else adapted.base
    if source.spec.head != "lm":
        raise ModelError(
            f"{folder}: is a reward model, whose head gives a score and no text; name the model that it judges"
        )
    tokenizer = _tokenizer_folder(folder, source)
    candidates = (folder, source.folder, tokenizer)
    settings = next((read for place in candidates if (read := read_generation(place)) is not None), {})
    name = str(path) if not Path(path).expanduser().exists() else given.resolve().name
    return ModelFiles(name, folder, source, adapted, tokenizer, settings, _chat_options(given), chosen.words)


def _tokenizer_folder(folder: Path, source: Source) -> Path:
    """Return the folder with the tokenizer of the model in `folder`: its own, or else that of its `source`."""
    saved = kumi_checkpoint.open_saved_model(folder).tokenizer if kumi_checkpoint.is_checkpoint(folder) else None
    for candidate in (folder, saved, source.tokenizer):
        if candidate is not None and (candidate / "tokenizer.json").is_file():
            return candidate
    named = saved or source.tokenizer
    if named is None:
        raise ConfigError(
            f"{folder}: this checkpoint names no tokenizer; convert it to a Hugging Face folder, and copy "
            "the tokenizer's files there"
        )
    raise ConfigError(
        f"{folder}: its tokenizer {named} has no tokenizer.json; restore that folder, or save the tokenizer with "
        "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def _chat_options(folder: Path) -> ChatOptions:
    """Return data.chat of the run whose folder is or contains `folder`; the defaults for other folders."""
    places = (folder, folder.parent, folder.parent.parent)
    run = next(
        (place for place in places if (place / CONFIG_FILE).is_file() and (place / "checkpoints").is_dir()), None
    )
    if run is None:
        return ChatOptions()
    data = load_stored_config(run).data
    return ChatOptions(**data.chat.model_dump())


def stop_ids(files: ModelFiles, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a reply of the model in `files`: see `reply_ends`."""
    return reply_ends(tokenizer, files.settings, files.chat, files.spec.vocab_size, files.folder)


def reply_ends(
    tokenizer: Tokenizer, settings: Mapping[str, Any], chat: ChatOptions, vocab_size: int, folder: Path
) -> frozenset[int]:
    """Return the ids that end a reply: eos_token_id of generation_config.json, or else the tokenizer's eos token.

    The tokens of the run's data.chat.stop_tokens are added. `settings`: the content of generation_config.json.
    `folder`: the model's folder, for messages. Raise ConfigError for an id outside the vocabulary.
    """
    value = settings.get("eos_token_id")
    eos_ids = value if isinstance(value, list) else [tokenizer.eos_id] if value is None else [value]
    for eos_id in eos_ids:
        if type(eos_id) is not int or not 0 <= eos_id < vocab_size:
            raise ConfigError(
                f"generation_config.json of {folder}: eos_token_id {brief(eos_id)} is no id below the vocabulary "
                f"of {vocab_size}; correct it"
            )
    texts = load_stops(tokenizer, chat) if chat.stop_tokens else ()
    return frozenset(eos_ids) | {tokenizer.backend.token_to_id(text) for text in texts}


def weights_digest(files: ModelFiles) -> str:
    """Return a hash of the weights of `files`, without reading all of them: see `base_digest`."""
    digests = [_folder_digest(folder) for folder in dict.fromkeys((files.folder, files.source.folder))]
    return hashlib.sha256("/".join(digests).encode()).hexdigest()


def _folder_digest(folder: Path) -> str:
    """Return a hash of the weights in `folder`; of the names and sizes of all its files if its kind is unknown."""
    if (folder / "config.json").is_file():
        return base_digest(folder)
    # A checkpoint's index has the checksums of its tensors; adapters are small.
    for name, limit in (("index.json", INDEX.size), (ADAPTER_WEIGHTS, _MAX_ADAPTERS)):
        if (folder / name).is_file():
            return hashlib.sha256(read_bytes(folder, name, limit=limit)).hexdigest()
    sizes = sorted(f"{file.relative_to(folder)}:{file.stat().st_size}" for file in folder.rglob("*") if file.is_file())
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()
