"""New tokens in the files of a tokenizer, every old token with the id it had."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.convert.vocab.base import Base, parsed
from kumi.convert.vocab.learn import Piece
from kumi.convert.vocab.wanted import Wanted
from kumi.errors import ConfigError
from kumi.files.output import copy_into, write_text
from kumi.files.untrusted import TOKENIZER, read_object

# Other files that hold a vocabulary, which would be the old one; tokenizer.json stands for all of them.
STALE = ("vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json")


def extended(base: Base, pieces: Sequence[Piece], tokens: Sequence[Wanted]) -> Base:
    """`base` with `pieces` (a BPE's) and then `tokens`, numbered from `base.size` on.

    ConfigError when the library would number them otherwise, or give an old token another id.
    """
    for explicit in (True,) if pieces else (False, True):
        data = _data(base, pieces, tokens, explicit=explicit)
        found = parsed(base.folder, data, json.dumps(data, ensure_ascii=False))
        if _as_wanted(base, found, pieces, tokens):
            _check_spelled_back(found, tokens)
            return found
    raise ConfigError(
        f"{base.folder}: the tokenizers library would give tokens of this {base.kind} tokenizer other "
        f"ids once some are added, for it leaves ids out or has one twice; number them anew"
    )


def _data(base: Base, pieces: Sequence[Piece], tokens: Sequence[Wanted], *, explicit: bool) -> dict[str, Any]:
    """tokenizer.json with the new tokens; `explicit` where the ids of added ones are to be in the model, too: the
    library numbers those after the model's by itself, so that a model that grew would move them."""
    data: dict[str, Any] = json.loads(json.dumps(base.data))
    numbers = range(base.size + len(pieces), base.size + len(pieces) + len(tokens))
    data["added_tokens"] = [*(data.get("added_tokens") or []), *map(_entry, tokens, numbers)]
    vocab = data["model"]["vocab"]
    if pieces:
        listed = _merges_are_lists(data["model"])
        vocab |= {piece.text: base.size + number for number, piece in enumerate(pieces)}
        merges = [piece.merge for piece in pieces if piece.merge is not None]
        data["model"]["merges"] += [list(pair) if listed else " ".join(pair) for pair in merges]
    if explicit and isinstance(vocab, dict):
        vocab |= {entry["content"]: entry["id"] for entry in data["added_tokens"]}
    return data


def _merges_are_lists(model: Mapping[str, Any]) -> bool:
    return not model["merges"] or isinstance(model["merges"][0], list)


def _entry(token: Wanted, number: int) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": token.text, **plain, "special": token.special}


def _as_wanted(base: Base, found: Base, pieces: Sequence[Piece], tokens: Sequence[Wanted]) -> bool:
    """Whether old tokens kept their ids, new ones have theirs, and a text that is an added token becomes that alone."""
    names = [*(piece.text for piece in pieces), *(token.text for token in tokens)]
    wanted = dict(base.vocab) | {name: base.size + number for number, name in enumerate(names)}
    if dict(found.vocab) != wanted:
        return False
    return all(
        found.backend.encode(token.text, add_special_tokens=False).ids == [wanted[token.text]] for token in tokens
    )


def _check_spelled_back(new: Base, tokens: Sequence[Wanted]) -> None:
    """A byte-level decoder takes the letters of an added token for bytes, where all of them could be: ü is lost."""
    for token in tokens:
        found = new.backend.decode([new.vocab[token.text]], skip_special_tokens=False)
        if found != token.text:
            raise ConfigError(
                f"{token.where}: this tokenizer's decoder would spell {token.text!r} as {found!r}, "
                f"for letters such as ü in added tokens are bytes to it; use --learn"
            )


def write_files(base: Base, new: Base, tokens: Sequence[Wanted], folder: Path, names: Sequence[str]) -> list[str]:
    """Write the tokenizer `new` into `folder`: the files `names` of `base`, edited where they list added tokens.

    Returns the names of files that were left out, because they hold the old vocabulary in another format.
    """
    there = [name for name in names if (base.folder / name).is_file()]
    for name in there:
        if name not in STALE:
            copy_into(folder, base.folder, name)
    _write(folder / "tokenizer.json", new.data)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            _edit_config(folder / name, new, tokens)
    return [name for name in there if name in STALE]


def _edit_config(file: Path, new: Base, tokens: Sequence[Wanted]) -> None:
    """Add `tokens` to the lists of added tokens that `file` has."""
    found = read_object(file.parent, file.name, ConfigError, TOKENIZER)
    edited = dict(found)
    if isinstance(found.get("added_tokens_decoder"), dict):
        entries = [_entry(token, new.vocab[token.text]) for token in tokens]
        edited["added_tokens_decoder"] = found["added_tokens_decoder"] | {
            str(entry.pop("id")): entry for entry in entries
        }
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(found.get(key), list):
            edited[key] = [*found[key], *(token.text for token in tokens if token.special)]
    if edited != found:
        _write(file, edited)


def _write(file: Path, content: Mapping[str, Any]) -> None:
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
