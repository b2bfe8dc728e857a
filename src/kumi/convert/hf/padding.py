"""The padding token of an exported reward model, by which transformers finds the last token of a sequence.

transformers' sequence classifiers return the score of the last token that is not padding, so the padding must not be a
token that ends a sequence: with the usual pad = eos, the score would be that of the token before the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kumi.files.output import write_text
from kumi.files.untrusted import TOKENIZER, read_object

_CONFIG, _TOKENIZER = "tokenizer_config.json", "tokenizer.json"
# Names of special tokens that no text contains, the best first. Padding tokens of images, sounds and infilling are not
# among them: they have a meaning.
_OTHER = "image|video|vision|audio|fim"
_PADS = re.compile(rf"^(?!.*({_OTHER})).*pad", re.I), re.compile("reserved|unused", re.I)


def padding_token(config: Mapping[str, Any], tokenizer: str | Path | None) -> tuple[int, str] | None:
    """Return the id and the text of the padding token of a reward model; the text is "" for the token of `config`.

    It is the first of these that does not end a sequence: the padding token of `config`, that of the folder
    `tokenizer`, a special token whose name tells that it is for padding or unused, and the tokenizer's unknown token.
    None if there is none: transformers then refuses batches of sequences.
    """
    ends, settings = _ids(config.get("eos_token_id")), _read(tokenizer, _CONFIG)
    tokens = [token for token in _read(tokenizer, _TOKENIZER).get("added_tokens") or () if _is_special(token)]
    by_text = {token["content"]: token["id"] for token in tokens}
    ends |= {by_text.get(_text(settings.get("eos_token")))}
    candidates = [(config.get("pad_token_id"), ""), *((by_text.get(text), text) for text in _texts(settings, by_text))]
    for token_id, text in candidates:
        if token_id is not None and _is_id(token_id, config) and token_id not in ends:
            return token_id, text
    return None


def write_padding_token(folder: Path, text: str) -> None:
    """Write `text` as the padding token of the tokenizer in `folder`, so that a caller pads with it."""
    if (folder / _CONFIG).is_file():
        settings = read_object(folder, _CONFIG, infinity=True) | {"pad_token": text}
        write_text(folder / _CONFIG, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _texts(settings: Mapping[str, Any], by_text: Mapping[str, int]) -> Iterator[str]:
    """Yield the texts of candidates: the tokenizer's padding token, special tokens by name, its unknown token."""
    yield _text(settings.get("pad_token"))
    for pattern in _PADS:
        yield from (text for text in by_text if pattern.search(text))
    yield _text(settings.get("unk_token"))


def _read(folder: str | Path | None, name: str) -> dict[str, Any]:
    if folder is None or not (Path(folder) / name).is_file():
        return {}
    return read_object(Path(folder), name, bounds=TOKENIZER, infinity=True)


def _is_special(token: Any) -> bool:
    return isinstance(token, dict) and token.get("special") is True and isinstance(token.get("content"), str)


def _is_id(number: Any, config: Mapping[str, Any]) -> bool:
    return type(number) is int and 0 <= number < config["vocab_size"]


def _ids(value: Any) -> set[Any]:
    return set(value) if isinstance(value, list) else {value}


def _text(token: Any) -> str:
    """Return the text of a special token of the tokenizer's settings, "" for none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
