"""Add new tokens to the files of a tokenizer; every old token keeps its id."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.convert.vocab.base_tokenizer import Base, parse_tokenizer
from kumi.convert.vocab.learn import Piece
from kumi.convert.vocab.requested_tokens import NewToken
from kumi.errors import ConfigError
from kumi.files.output import copy_into, write_text
from kumi.files.untrusted import TOKENIZER, read_object

# Other files with a vocabulary. They would be outdated, and tokenizer.json replaces all of them.
STALE = ("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json")


def extended_tokenizer(base: Base, pieces: Sequence[Piece], tokens: Sequence[NewToken]) -> Base:
    """Return `base` with `pieces` (BPE only) and then `tokens`, with ids from `base.size` on.

    Raise ConfigError if the tokenizers library would assign other ids to new or old tokens.
    """
    for explicit in (True,) if pieces else (False, True):
        data = _tokenizer_json(base, pieces, tokens, explicit=explicit)
        new_base = parse_tokenizer(base.folder, data, json.dumps(data, ensure_ascii=False))
        if _ids_are_right(base, new_base, pieces, tokens):
            _check_decoding(new_base, tokens)
            return new_base
    raise ConfigError(
        f"{base.folder}: this {base.kind} tokenizer skips or repeats ids, so the tokenizers library would change the "
        f"ids of tokens when others are added; renumber its tokens without gaps"
    )


def _tokenizer_json(
    base: Base, pieces: Sequence[Piece], tokens: Sequence[NewToken], *, explicit: bool
) -> dict[str, Any]:
    """Return tokenizer.json with the new tokens.

    With `explicit`, added tokens are listed in the model's vocabulary, too. The library numbers added tokens after
    those of the model, so they would move when the model grows.
    """
    data: dict[str, Any] = json.loads(json.dumps(base.data))
    ids = range(base.size + len(pieces), base.size + len(pieces) + len(tokens))
    data["added_tokens"] = [*(data.get("added_tokens") or []), *map(_entry, tokens, ids)]
    vocab = data["model"]["vocab"]
    if pieces:
        as_lists = _merges_are_lists(data["model"])
        vocab |= {piece.text: base.size + index for index, piece in enumerate(pieces)}
        merges = [piece.merge for piece in pieces if piece.merge is not None]
        data["model"]["merges"] += [list(pair) if as_lists else " ".join(pair) for pair in merges]
    if explicit and isinstance(vocab, dict):
        vocab |= {entry["content"]: entry["id"] for entry in data["added_tokens"]}
    return data


def _merges_are_lists(model: Mapping[str, Any]) -> bool:
    """True if merges are lists of two strings, False if they are strings with a blank."""
    return not model["merges"] or isinstance(model["merges"][0], list)


def _entry(token: NewToken, token_id: int) -> dict[str, Any]:
    """Return the entry of an added token in tokenizer.json."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token.text, **flags, "special": token.special}


def _ids_are_right(base: Base, new_base: Base, pieces: Sequence[Piece], tokens: Sequence[NewToken]) -> bool:
    """True if old tokens kept their ids, new tokens have theirs, and the text of each added token encodes to it."""
    names = [*(piece.text for piece in pieces), *(token.text for token in tokens)]
    expected = dict(base.vocab) | {name: base.size + index for index, name in enumerate(names)}
    if dict(new_base.vocab) != expected:
        return False
    return all(
        new_base.backend.encode(token.text, add_special_tokens=False).ids == [expected[token.text]] for token in tokens
    )


def _check_decoding(new: Base, tokens: Sequence[NewToken]) -> None:
    """Raise ConfigError unless each added token decodes to its own text.

    A byte-level decoder turns a token into bytes if all its letters, such as ü, stand for bytes.
    """
    for token in tokens:
        decoded = new.backend.decode([new.vocab[token.text]], skip_special_tokens=False)
        if decoded != token.text:
            raise ConfigError(
                f"{token.where}: this tokenizer would decode {token.text!r} as {decoded!r}, "
                f"because its decoder maps letters such as ü to bytes; use --learn"
            )


def write_files(base: Base, new: Base, tokens: Sequence[NewToken], folder: Path, names: Sequence[str]) -> list[str]:
    """Write the tokenizer `new` into `folder`: the files `names` of `base`, with the added tokens.

    Return the names of the files left out, which hold the old vocabulary in another format.
    """
    present = [name for name in names if (base.folder / name).is_file()]
    for name in present:
        if name not in STALE:
            copy_into(folder, base.folder, name)
    _write(folder / "tokenizer.json", new.data)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            _edit_config(folder / name, new, tokens)
    return [name for name in present if name in STALE]


def _edit_config(file: Path, new: Base, tokens: Sequence[NewToken]) -> None:
    """Add `tokens` to the lists of added tokens in `file`."""
    config = read_object(file.parent, file.name, ConfigError, TOKENIZER)
    edited = dict(config)
    if isinstance(config.get("added_tokens_decoder"), dict):
        entries = [_entry(token, new.vocab[token.text]) for token in tokens]
        edited["added_tokens_decoder"] = config["added_tokens_decoder"] | {
            str(entry.pop("id")): entry for entry in entries
        }
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(key), list):
            edited[key] = [*config[key], *(token.text for token in tokens if token.special)]
    if edited != config:
        _write(file, edited)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
